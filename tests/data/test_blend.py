import pickle
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from torchtitan.config import describe_error, load_config
from torchtitan.data.blend import Blend, Source, plan_blend, plan_one
from torchtitan.data.datasets import check_source
from torchtitan.data.tokenizers.utf8 import BytesTokenizer
from torchtitan.data.tokens.encode import Encoding
from torchtitan.data.tokens.store import Tokens
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError, keys_told_as
from torchtitan.feed import blended, check_same, check_share, open_rows
from torchtitan.log import logger
from torchtitan.resolve.job import resolve_job
from torchtitan.state import DataPosition, DataStage


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("wiki", "code", "books"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"content": "x"}\n')
    return tmp_path


def planned(*tables: dict[str, Any]) -> Blend:
    """As a file says it."""
    return plan_blend(load_config([f"--data.sources={text(tables)}"]).data.sources, "raise")


def opened(source: Source, folder: Path) -> Tokens:
    encoding = Encoding(BytesTokenizer(), None, None)
    return source.open(encoding, 256, cache_folder=str(folder / "cache"), rank=0, ranks=1)


def text(tables: tuple[dict[str, Any], ...]) -> str:
    def value(one: Any) -> str:
        return repr(one) if isinstance(one, (int, float)) else f"'{one}'"

    return f"[{', '.join('{' + ', '.join(f'{k} = {value(v)}' for k, v in table.items()) + '}' for table in tables)}]"


WIKI: dict[str, Any] = {"dataset": "text", "dataset_path": "wiki.txt"}
CODE: dict[str, Any] = {"dataset": "text", "dataset_path": "code.txt"}


def test_sources_and_stages(files: Path) -> None:
    blend = planned(
        WIKI | {"weight": 0.7},
        CODE | {"weight": 0.3, "name": "sources"},
        WIKI | {"from_step": 10},
        {"dataset": "text", "dataset_path": "books.txt", "from_step": 10, "weight": 2},
    )
    assert list(blend.sources) == ["wiki", "sources", "books"]
    assert [(stage.from_step, dict(stage.weights)) for stage in blend.stages] == [
        (1, {"wiki": Fraction(7, 10), "sources": Fraction(3, 10)}),
        (10, {"wiki": Fraction(1), "books": Fraction(2)}),
    ]
    tokens = {name: opened(source, files) for name, source in blend.sources.items()}
    assert {name: bytes(t.window(0, len(t)).tolist()).decode() for name, t in tokens.items()} == {
        "wiki": "text of wiki",
        "sources": "text of code",
        "books": "text of books",
    }


def test_one_data_set_is_a_blend_of_itself(files: Path) -> None:
    blend = plan_one("text", "wiki.txt", {}, "raise")
    assert [(list(stage.weights), stage.from_step) for stage in blend.stages] == [(["wiki"], 1)]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([WIKI | {"weight": 0}], "data.sources[0].weight=0 (command line): must be greater than 0"),
        ([WIKI, CODE | {"weight": -0.5}], "data.sources[1].weight=-0.5 (command line): must be greater than 0"),
        ([WIKI | {"weight": float("nan")}], "data.sources[0].weight=nan (command line): must be a finite number"),
        (
            [{"dataset_path": "wiki.txt"}],
            'data.sources[0].dataset (command line): is missing; such as dataset = "jsonl"',
        ),
        ([WIKI | {"dataset": "txt"}], "unknown dataset 'txt'; did you mean text?"),
        ([WIKI | {"text_key": "x"}], "data.sources[0].text_key (command line): is no option of dataset 'text', but of"),
        (
            [WIKI | {"wieght": 1}],
            "data.sources[0].wieght (command line): unknown key; did you mean",
        ),
        ([WIKI, WIKI], "data.sources[1].name: 'wiki' is in this blend already"),
        ([WIKI, CODE | {"name": "wiki"}], "data.sources[1].name: 'wiki' is another data set in data.sources[0]"),
        ([WIKI | {"name": "a/b"}], 'data.sources[0].name="a/b" (command line): must be a word'),
        ([WIKI | {"from_step": 5}], "data.sources[0].from_step: no source is there from step 1 on"),
        ([WIKI, CODE | {"dataset_path": "nowhere*"}], "data.sources[1].dataset_path: no file, folder or glob matches"),
        ([WIKI, {"dataset": "text"}], "data.sources[1].dataset_path: the dataset text needs a file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(files: Path, tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(*tables)
    assert message in describe_error(caught.value)


def test_a_bad_id_names_the_source_when_its_row_comes(files: Path) -> None:
    np.array([1, 2, 3, 999, 4, 5], "<u2").tofile("x.ds")
    ids = {"dataset": "nanoset", "dataset_path": "x.ds", "token_bytes": 2}
    argv = [f"--data.sources={text((CODE, ids))}", "--training.seq_len=2", "--model.args.vocab_size=300"]
    job = resolve_job(load_config([*argv, "--tokenizer.name=bytes", "--data.bos_id=256", "--data.eos_id=256"]), 1)
    rows = pickle.loads(pickle.dumps(blended(job, open_rows(job), [0])))
    with pytest.raises(ConfigError, match="token 3 is 999") as refused:
        [rows[row] for row in range(8)]
    assert refused.value.key == "data.sources[1].dataset_path"


def test_packing_that_a_source_does_not_fit_names_the_source(files: Path) -> None:
    np.array([1, 2, 3, 4], "<u2").tofile("x.ds")
    ids = {"dataset": "nanoset", "dataset_path": "x.ds", "token_bytes": 2}
    job = resolve_job(load_config([f"--data.sources={text((ids,))}", "--data.packing=documents"]), 1)
    with pytest.raises(ConfigError, match=r'^data.packing: x: "documents" needs to know where documents begin'):
        open_rows(job)


def test_what_is_said_of_keys_names_those_of_the_source(files: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(WIKI, {"dataset": "jsonl", "dataset_path": "bad.jsonl", "text_key": "title"})
    assert refused.value.key == "data.sources[1].dataset_path"
    assert "no key 'title' (there are: text; set data.sources[1].text_key)" in refused.value.problem


def test_only_whole_keys_are_told_by_another_name() -> None:
    with pytest.raises(ConfigError) as refused, keys_told_as({"training.dataset": "data.sources[0].dataset"}):
        raise ConfigError("data.packing", "set training.dataset, not training.dataset_path or my.training.dataset")
    assert refused.value.problem == "set data.sources[0].dataset, not training.dataset_path or my.training.dataset"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (SimpleNamespace(name="mine", read=None, num_pieces=1), "returned a TextSource without description"),
        (SimpleNamespace(name="mine", description="", open=None), "returned a TokenSource without order_options"),
        (7, "must return a TextSource, StreamSource or TokenSource, not 7"),
    ],
)
def test_what_is_no_data_set_is_told(made: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_source(made, "mine")


def test_a_bad_record_names_the_source(files: Path) -> None:
    blend = planned(WIKI, {"dataset": "jsonl", "dataset_path": "bad.jsonl"})
    with pytest.raises(ConfigError, match=r"^data.sources\[1\].dataset_path: .*bad.jsonl:2: no key 'text'"):
        opened(blend.sources["bad"], files)


@pytest.mark.parametrize("other", ["--training.dataset=text", "--training.dataset_path=wiki.txt"])
def test_data_sets_are_named_in_one_place(files: Path, other: str) -> None:
    with pytest.raises(ConfigError, match=r"data.sources names the data sets; leave this out"):
        load_config([other, f"--data.sources={text((WIKI,))}"])


@pytest.mark.parametrize("command_line", [True, False])
def test_options_stand_with_the_data_set_they_are_for(files: Path, command_line: bool) -> None:
    sources = f"--data.sources={text((WIKI,))}"
    Path("job.toml").write_text('[data.args]\ntext_key = "body"\n')
    more = ["--data.args.text_key=body"] if command_line else ["--job.config_file=job.toml"]
    with pytest.raises(ConfigError, match=r"data.sources names the data sets; let this stand in the table") as refused:
        load_config([*more, sources])
    assert refused.value.key == "data.args.text_key"
    assert load_config([sources]).data.args == {}


def test_ranks_that_found_other_data_are_told_on_all_of_them() -> None:
    key = "data.sources[1].dataset_path"
    own = {"training.dataset_path": "a", key: "b"}

    def world(*others: dict[str, str]) -> World:
        return cast(World, SimpleNamespace(gather=lambda mine: [own, *others]))

    check_same(world(own, own), own)
    for mine in (own, {**own, key: "c"}):
        with pytest.raises(ConfigError, match="rank 2 found other data there than rank 0") as refused:
            check_same(world(own, {**own, key: "c"}), mine)
        assert refused.value.key == key


def test_sources_that_give_no_row_are_told(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    sources = text((WIKI, CODE | {"weight": 1e-30}, {**CODE, "name": "later", "from_step": 1000}))
    argv = ["--training.seq_len=2", "--tokenizer.name=bytes", "--data.bos_id=256", "--data.eos_id=257"]
    job = resolve_job(load_config([f"--data.sources={sources}", *argv]), 1)
    rows = open_rows(job)
    check_share(job, rows, blended(job, rows, [0, 5000]), 900)
    assert [line for line in said if "no row of this run comes from code, later: " in line]


class TestPosition:
    ONE, TWO, THREE = DataStage(1, "one"), DataStage(11, "two", "data.sources[1].from_step"), DataStage(21, "three")

    def test_a_position_of_older_checkpoints(self) -> None:
        position = DataPosition([self.ONE])
        position.load_state_dict({"fingerprint": "one", "next_row": 30})
        assert position.place_stages(5, 6) == [0]
        assert position.state_dict() == {"fingerprint": "one", "next_row": 30}

    def test_stages_begin_with_the_rows_of_their_steps(self) -> None:
        position = DataPosition([self.ONE, self.TWO, self.THREE])
        assert position.place_stages(0, 6) == [0, 60, 120]
        assert position.state_dict()["stages"] == [[0, "one", 1]]
        position.next_row = 66
        assert position.state_dict()["stages"] == [[0, "one", 1], [60, "two", 11]]

    def test_what_has_begun_stays_and_the_rest_follows_the_steps(self) -> None:
        """Another global batch moves the stages that have not begun."""
        saved = {"fingerprint": "one", "next_row": 72, "stages": [[0, "one"], [60, "two"]]}
        position = DataPosition([self.ONE, self.TWO, self.THREE])
        position.load_state_dict(saved)
        assert position.place_stages(12, 10) == [0, 60, 72 + 8 * 10]

    def test_a_stage_may_be_added_while_it_is_to_come(self) -> None:
        for stages in ([self.ONE, self.TWO], [self.ONE, DataStage(9, "another")]):
            position = DataPosition(stages)
            position.load_state_dict({"fingerprint": "one", "next_row": 48})
            assert position.place_stages(8, 6) == [0, 48 + (stages[1].from_step - 9) * 6]
        late = DataPosition([self.ONE, self.TWO])
        late.load_state_dict({"fingerprint": "one", "next_row": 78})
        with pytest.raises(ConfigError, match=r"data.sources\[1\].from_step: is not after step 13"):
            late.place_stages(13, 6)

    @pytest.mark.parametrize("from_step", [2, 12, 1000])
    def test_the_step_of_a_stage_that_has_begun_stays(self, from_step: int) -> None:
        saved = DataPosition([self.ONE, self.TWO])
        saved.place_stages(0, 6)
        saved.next_row = 66
        moved = DataPosition([self.ONE, DataStage(from_step, "two", "data.sources[1].from_step")])
        with pytest.raises(ConfigError, match=r"data.sources\[1\].from_step: was 11 when the checkpoint was saved"):
            moved.load_state_dict(saved.state_dict())
        again = DataPosition([self.ONE, self.TWO])
        again.load_state_dict(saved.state_dict())
        assert again.place_stages(11, 6) == [0, 60]

    def test_data_that_begin_anew_begin_with_the_stage_of_their_step(self) -> None:
        assert DataPosition([self.ONE, self.TWO, self.THREE]).place_stages(15, 6) == [0, 0, 30]

    @pytest.mark.parametrize(
        "state",
        [
            {"fingerprint": "other", "next_row": 0},
            {"fingerprint": "one", "next_row": 72, "stages": [[0, "one"], [60, "other"]]},
            {"fingerprint": "one", "next_row": 72, "stages": [[0, "one"], [30, "two"], [40, "x"], [50, "y"]]},
        ],
        ids=str,
    )
    def test_other_data_are_refused(self, state: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="its position means nothing"):
            DataPosition([self.ONE, self.TWO, self.THREE]).load_state_dict(state)

    @pytest.mark.parametrize("row", [-1, "5", 1.5])
    def test_a_row_is_a_number(self, row: Any) -> None:
        with pytest.raises(ValueError, match="a row is"):
            DataPosition([self.ONE]).load_state_dict({"fingerprint": "one", "next_row": row})
