import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.fake_hub import COMMIT, TOKEN
from torchtitan.data import files
from torchtitan.data.datasets import DATASETS, Skipped
from torchtitan.data.hub import broke_off
from torchtitan.errors import ConfigError

TRAIN = [f"train {i}" for i in range(100)]
SET = {"name": "hub", "path": "a/set"}
CASES: dict[str, dict[str, Any]] = {
    "whole": SET,
    "stream": {**SET, "streaming": True},
    "pinned": {**SET, "streaming": True, "revision": COMMIT},
    "other split": {**SET, "streaming": True, "split": "validation"},
    "no set": {"name": "hub", "path": "a/none"},
    "gated": {"name": "hub", "path": "a/gated"},
    "script": {"name": "hub", "path": "a/script"},
    "no revision": {**SET, "revision": "v9"},
    "no split": {**SET, "split": "test"},
    "no config": {**SET, "config": "fr"},
    "no column": {**SET, "streaming": True, "text_key": "body"},
    "no column of the whole": {**SET, "text_key": "body"},
    "c4": {"name": "c4", "path": None},
}
PROBLEMS = {
    "no set": "no folder a/none, and at the hub no data set of that name that you may read",
    "gated": "a/gated is gated: ask for access at ",
    "script": "a/script: Dataset scripts are no longer supported.*refs/convert/parquet",
    "no revision": "a/set has no revision 'v9' at the hub",
    "no split": r"a/set: no split 'test' \(there are: train, validation; set data.args.split\)",
    "no config": r"a/set: BuilderConfig 'fr' not found\. Available: \['default'\]; set data.args.config",
    "no column": r"a/set: .*no column 'body' \(there are: text, n; set data.args.text_key\)",
    "no column of the whole": r"a/set: no column 'body' \(there are: text, n; set data.args.text_key\)",
    "c4": "no folder allenai/c4, and at the hub no data set of that name",
}


def ask(cases: dict[str, Any], home: Path, **environment: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-m", "tests.data.fake_hub", json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases say of a hub, of none, and of what was kept of one."""
    home = tmp_path_factory.mktemp("hub")
    told, log = ask(CASES, home)
    # Aloud and once, though several of the cases name no revision.
    assert log.count("a/set may change at the hub: this run reads commit " + COMMIT) == 1
    assert TOKEN not in log + json.dumps(told)
    kept = {"kept": SET, "never kept": CASES["c4"]}
    offline, _ = ask(kept, home, HF_HUB_OFFLINE="1")
    gone, _ = ask({"gone": SET}, home)
    return {**told, **offline, **gone}


def test_documents_of_the_hub_whole_or_as_a_stream(told: dict[str, Any]) -> None:
    assert told["whole"]["documents"] == told["stream"]["documents"] == told["pinned"]["documents"] == TRAIN
    assert told["other split"]["documents"] == ["validation"]
    assert told["stream"]["fingerprint"] == told["pinned"]["fingerprint"] != told["other split"]["fingerprint"]


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_wrong_is_one_line_and_soon(told: dict[str, Any], case: str) -> None:
    problem = told[case]["problem"]
    assert re.search(PROBLEMS[case], problem) and "\n" not in problem
    assert told[case]["key"] == ("data.args.revision" if case == "no revision" else "training.dataset_path")
    assert told[case]["seconds"] < 20


def test_without_the_network(told: dict[str, Any]) -> None:
    assert told["kept"]["documents"] == TRAIN and told["kept"]["fingerprint"] == told["whole"]["fingerprint"]
    assert "HF_HUB_OFFLINE is set" in told["never kept"]["problem"]
    assert "cannot ask http://127.0.0.1:" in told["gone"]["problem"]
    assert "with HF_HUB_OFFLINE=1" in told["gone"]["problem"] and told["gone"]["seconds"] < 20


def build(path: Path | str, on_bad_record: str = "raise", **options: Any) -> Any:
    return DATASETS.bind("hub", options, key="data.args")(str(path), on_bad_record)


def read(source: Any) -> list[Any]:
    return [document for piece in range(source.num_pieces) for document in source.read(piece)]


class TestSaved:
    def save(self, folder: Path, texts: list[Any], **more: list[Any]) -> Path:
        datasets.Dataset.from_dict({"text": texts, **more}).save_to_disk(folder)
        return folder

    def test_rows_in_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_MIN_PIECE_BYTES", 500)
        monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 500)
        texts = [f"text {i} é" for i in range(1200)]
        source = build(self.save(tmp_path / "a", texts))
        assert source.num_pieces > 10 and read(source) == texts
        assert [source.num_pieces, source.fingerprint] == [
            (again := build(tmp_path / "a")).num_pieces,
            again.fingerprint,
        ]
        # What was shuffled or chosen from before it was saved keeps its order.
        shuffled = datasets.load_from_disk(str(tmp_path / "a")).shuffle(seed=1)
        shuffled.save_to_disk(tmp_path / "b")
        assert read(build(tmp_path / "b")) == shuffled["text"][:] != texts
        assert build(tmp_path / "b").fingerprint != source.fingerprint

    def test_splits(self, tmp_path: Path) -> None:
        parts = {"train": ["a"], "test": ["b"]}
        datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": t}) for k, t in parts.items()}).save_to_disk(
            tmp_path
        )
        assert read(build(tmp_path, split="test")) == ["b"]
        with pytest.raises(ConfigError, match=r"no split 'dev' \(there are: train, test"):
            build(tmp_path, split="dev")

    def test_bad_rows(self, tmp_path: Path) -> None:
        path = self.save(tmp_path / "a", ["x", None, ""], n=[1, 2, 3])
        with pytest.raises(ConfigError, match="a: row 2: null, not text; mend it"):
            read(build(path))
        x, skipped, empty = read(build(path, "skip"))
        assert (x, empty) == ("x", "") and isinstance(skipped, Skipped)
        with pytest.raises(ConfigError, match=r"no column 'body' \(there are: text, n;"):
            build(path, text_key="body")
        with pytest.raises(ConfigError, match="column 'n' holds int64, not text"):
            build(path, text_key="n")

    def test_is_no_stream(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="leave out streaming"):
            build(self.save(tmp_path / "a", ["x"]), streaming=True)


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "c"}\n')
    assert read(build(tmp_path)) == ["a", "b"]
    assert read(build(tmp_path, split="test")) == ["c"]


@pytest.mark.parametrize(
    ("path", "options", "key", "problem"),
    [
        ("json", {}, "data.args.data_files", "which files"),
        ("json", {"data_files": ["gone.jsonl"]}, "training.dataset_path", "Unable to find .*gone.jsonl"),
        ("a/b/c", {}, "training.dataset_path", "there is no folder a/b/c"),
        ("allenai/c4", {"shuffle_rows": 4}, "data.args.shuffle_rows", "is of streams"),
        (__file__, {}, "training.dataset_path", "is a file; set training.dataset to jsonl"),
        (str(Path(__file__).parent), {"revision": "x"}, "data.args.revision", "does not come from the hub"),
    ],
)
def test_what_cannot_be_meant(path: str, options: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        build(path, **options)
    assert error.value.key == key


def test_what_may_be_tried_again() -> None:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    # The library that the hub's own speaks with, which differs by its version.
    modules = {base.__module__.partition(".")[0] for base in HfHubHTTPError.__mro__}
    (name,) = modules & {"httpx", "httpx2"}
    httpx = importlib.import_module(name)

    def answered(code: int, kind: Any = HfHubHTTPError) -> Exception:
        response = httpx.Response(code, request=httpx.Request("GET", "http://hub"))
        return kind("no", response=response)

    again = [ConnectionResetError(), TimeoutError(), httpx.ReadTimeout("x"), answered(503), answered(429)]
    never = [FileNotFoundError(), answered(404), answered(403, GatedRepoError), ValueError("x"), pa.ArrowInvalid("x")]
    assert all(broke_off(error) for error in again) and not any(broke_off(error) for error in never)


class TestC4:
    def read(self, name: str, path: Path, **options: Any) -> list[Any]:
        return read(DATASETS.bind(name, options, key="data.args")(str(path), "raise"))

    def test_a_copy_of_the_hubs_folder(self, tmp_path: Path) -> None:
        (tmp_path / "en").mkdir()
        for name, text in (("train.00000-of-00001", "t"), ("validation.00000-of-00001", "v")):
            (tmp_path / "en" / f"c4-{name}.json").write_text(json.dumps({"text": text}) + "\n")
        for folder in (tmp_path, tmp_path / "en"):
            assert self.read("c4", folder) == ["t"] and self.read("c4_validation", folder) == ["v"]

    def test_what_lies_at_a_path(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"body": "lines"}\n')
        assert self.read("c4", tmp_path, text_key="body") == ["lines"]
        pa.parquet.write_table(pa.table({"text": ["rows"]}), tmp_path / "b.parquet")
        assert self.read("c4", tmp_path / "b.parquet") == self.read("c4_validation", tmp_path) == ["rows"]
        datasets.Dataset.from_dict({"text": ["saved"]}).save_to_disk(tmp_path / "saved")
        assert self.read("c4", tmp_path / "saved") == self.read("c4_validation", tmp_path / "saved") == ["saved"]
        assert self.read("hub", tmp_path / "saved") == ["saved"]
        with pytest.raises(ConfigError, match="holds one data set and no other") as error:
            self.read("hub", tmp_path / "saved", split="test")
        assert error.value.key == "data.args.split"

    def test_what_is_of_the_hub_alone(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is of the hub's stream") as error:
            self.read("c4", tmp_path, revision="main")
        assert error.value.key == "data.args.revision"


def test_an_empty_stream_has_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    options = {"data_files": [str(tmp_path / "a.jsonl")], "streaming": True}
    with pytest.raises(ConfigError, match="there is no record in it"):
        DATASETS.bind("hub", options, key="data.args")("json", "raise")
