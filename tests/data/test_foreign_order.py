import itertools
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.token_files import ds, indexed, source
from torchtitan.data.blend import Source, plan_blend
from torchtitan.data.rows.foreign import check_order, in_their_order, source_rows
from torchtitan.data.rows.greedy import greedy_blend
from torchtitan.data.rows.megatron import Epochs, sample_tables, samples_of
from torchtitan.data.rows.nanoset import nanoset_tables
from torchtitan.data.rows.tables import open_tables
from torchtitan.data.tokens.megatron import split_range
from torchtitan.errors import ConfigError
from torchtitan.log import logger


def ordered(sources: list[Any], weights: list[float] | None, *, vocab_size: int, seq_len: int, samples: int) -> Any:
    """The rows of ``sources`` as a run has them."""
    named = {str(k): Source(source) for k, source in enumerate(sources)}
    shares = {str(k): Fraction(repr(weight)) for k, weight in enumerate(weights or [1] * len(sources))}
    rows = source_rows(named, shares, vocab_size=vocab_size, seq_len=seq_len, samples=samples)
    return in_their_order(named, rows, shares, samples=samples)


# What other programs give is checked in tests/peers; the vectors here are worked out from their rules.


def test_greedy_rule() -> None:
    chosen, before = greedy_blend([0.7, 0.3], 10)
    assert chosen.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert before.tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]
    chosen, _ = greedy_blend([0.1, 0.5, 0.3, 0.1], 20)
    assert chosen.tolist() == [1, 2, 0, 1, 3, 1, 2, 1, 2, 1, 0, 1, 2, 1, 3, 1, 2, 1, 2, 1]


class TestNanoset:
    @pytest.mark.parametrize(
        ("weights", "seed", "expected"),
        [
            (None, 1234, "01 10 03 00 11 02 01 10"),
            ([0.5, 0.5], 1234, "01 10 10 00 02 11 01 10"),
            ([0.5, 0.5], 42, "00 10 10 01 02 11 00 10"),
        ],
    )
    def test_order_of_two_folders(self, weights: list[float] | None, seed: int, expected: str) -> None:
        order = nanoset_tables([4, 2], weights or [4, 2], seed)
        pairs = zip(order["chosen"].tolist(), order["own"].tolist(), strict=True)
        assert [f"{d}{w}" for d, w in itertools.islice(itertools.cycle(pairs), 8)] == expected.split()

    def rows(self, tmp_path: Path, seq_len: int = 3) -> Any:
        for number in range(6):
            ds(tmp_path / "a" / f"{number}.ds", [list(range(10 * number, 10 * number + 9))])
        return ordered([source("nanoset", tmp_path / "a")], None, vocab_size=100, seq_len=seq_len, samples=0)

    def test_windows_of_files_in_the_order_of_datatrove(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        rows = self.rows(tmp_path)
        files = [3, 2, 5, 4, 1, 0]  # default_rng(42).permutation(6)
        windows = [(10 * f + 4 * w) for f in files for w in range(2)]
        place = np.arange(12)
        np.random.RandomState(1234).shuffle(place)
        assert [int(rows[k][0][0]) for k in range(24)] == [windows[k] for k in place] * 2
        tokens, labels, positions = rows[5]
        assert labels.tolist() == [i + 1 for i in tokens.tolist()] and positions.tolist() == [0, 1, 2]
        again = pickle.loads(pickle.dumps(rows))
        assert again[17][0].equal(rows[17][0]) and again.fingerprint == rows.fingerprint

    @pytest.mark.parametrize("what", ["zeros", "a bit", "gone", "of an older version"])
    def test_tables_that_were_changed_are_made_again(
        self, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []

        def make() -> dict[str, np.ndarray]:
            made.append(1)
            return {"chosen": np.arange(100), "own": np.arange(100)}

        first = {name: t.copy() for name, t in open_tables("x", (1,), make, cache_folder=str(tmp_path)).items()}
        (table,) = tmp_path.glob("order-x-*/own.npy")
        content = table.read_bytes()
        if what == "zeros":
            table.write_bytes(bytes(len(content)))
        elif what == "a bit":
            table.write_bytes(content[:-1] + b"#")
        else:
            (table if what == "gone" else table.with_name("hashes.json")).unlink()
        warned: list[str] = []
        monkeypatch.setattr(logger, "warning", warned.append)
        for _ in range(2):
            again = open_tables("x", (1,), make, cache_folder=str(tmp_path))
            assert again.keys() == first.keys() and all((again[name] == first[name]).all() for name in first)
        assert len(made) == 2 and table.read_bytes() == content
        assert len(warned) == (what != "of an older version")

    def test_too_long_a_window(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        with pytest.raises(ConfigError, match="no file holds the 10 tokens") as error:
            self.rows(tmp_path, seq_len=9)
        assert error.value.key == "training.seq_len"


class TestMegatron:
    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ([7, 5, 4, 3], [(0, 0), (0, 4), (1, 1), (2, 0), (3, 0)]),
            ([5, 1, 1, 9], [(0, 0), (0, 4), (3, 1), (3, 5)]),
        ],
    )
    def test_where_samples_begin(
        self, monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected: list[tuple[int, int]]
    ) -> None:
        class Unshuffled:
            def __init__(self, seed: int) -> None: ...

            def shuffle(self, table: np.ndarray) -> None: ...

        monkeypatch.setattr(np.random, "RandomState", Unshuffled)
        tables = sample_tables(range(4), np.array(sizes, "<i4"), Epochs(1, 0), seq_len=4, seed=0)
        assert [tuple(row) for row in tables["samples"].tolist()] == expected

    def test_epochs(self) -> None:
        assert Epochs.needed(738, tokens=47293, seq_len=64) == Epochs(1, 0)
        assert Epochs.needed(739, tokens=47293, seq_len=64) == Epochs(2, 738)
        assert Epochs.needed(2000, tokens=47293, seq_len=64) == Epochs(3, 1477)
        assert Epochs.needed(2200, tokens=47293, seq_len=64) == Epochs(3, 0)

    @pytest.mark.parametrize(
        ("split", "ranges"),
        [
            ("969, 30, 1", [(0, 969), (969, 999), (999, 1000)]),
            ("100,0,0", [(0, 1000), (1000, 1000), (1000, 1000)]),
            ("1", [(0, 1000), (1000, 1000), (1000, 1000)]),
            ("1,1", [(0, 500), (500, 1000), (1000, 1000)]),
        ],
    )
    def test_split(self, split: str, ranges: list[tuple[int, int]]) -> None:
        assert [split_range(split, part, 1000) for part in ("train", "valid", "test")] == ranges

    @pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,2,3,4", "-1,2", "inf"])
    def test_no_split(self, split: str) -> None:
        with pytest.raises(ConfigError, match="no list of up to three shares") as error:
            split_range(split, "train", 10)
        assert error.value.key == "data.args.split"

    def gpt(self, prefix: Path, samples: int = 10, **options: Any) -> Any:
        named, shares = {"x": Source(source("megatron", prefix, **options))}, {"x": Fraction(1)}
        return source_rows(named, shares, vocab_size=100, seq_len=3, samples=samples)["x"]

    def test_each_epoch_reads_every_token_once_across_sequences(self, tmp_path: Path) -> None:
        documents = [[7], [1, 2, 3, 4, 5], [], [6, 8], list(range(10, 21))]
        rows = self.gpt(indexed(tmp_path / "x", documents), samples=6, split="1")
        assert len(rows) == (19 - 1) // 3
        found = {int(rows.tables["shuffled"][k]): rows[k] for k in range(6)}
        stream = [i for s in rows.tables["documents"].tolist() for i in [d for d in documents if d][s]]
        for sample in range(6):
            tokens, labels, positions = found[sample]
            assert tokens.tolist() == stream[3 * sample : 3 * sample + 3] and positions.tolist() == [0, 1, 2]
            assert labels.tolist() == stream[3 * sample + 1 : 3 * sample + 4]
        again = pickle.loads(pickle.dumps(rows))
        assert again[5][0].equal(rows[5][0]) and again.fingerprint == rows.fingerprint
        with pytest.raises(IndexError, match="row 6 is beyond the 6"):
            rows[6]

    def test_fingerprint_changes_where_rows_do(self, tmp_path: Path) -> None:
        prefix = indexed(tmp_path / "x", [[1, 2, 3, 4]] * 5)
        same = [self.gpt(prefix, samples=n, split="1").fingerprint for n in (1, 3, 6)]
        others = [
            self.gpt(prefix, samples=9, split="1").fingerprint,
            self.gpt(prefix, samples=6, split="1", order_seed=1).fingerprint,
            self.gpt(prefix, samples=3, split="4,1").fingerprint,
        ]
        assert len(set(same)) == 1 and len({*same, *others}) == 4

    def test_part_without_tokens(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"gives test 0 tokens in 0 of 2 sequences, and a sample takes 4"):
            self.gpt(indexed(tmp_path / "x"), part="test")

    def test_blend(self, tmp_path: Path) -> None:
        sources = [
            source("megatron", indexed(tmp_path / f"{k}", [[k] * 50] * 4), order_seed=7, split="1") for k in range(2)
        ]
        rows = ordered(sources, [7, 3], vocab_size=100, seq_len=4, samples=60)
        assert [int(rows[k][0][0]) for k in range(10)] == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
        assert [samples_of(share, 60) for share in (0.7, 0.3)] == [43, 19]
        taken = [int(rows[k][0][0]) for k in range(60)]
        alone = ordered(sources[1:], None, vocab_size=100, seq_len=4, samples=19)
        assert taken.count(1) == 18 and rows[taken.index(1, 55)][1].equal(alone[17][1])
        assert rows.counts(10) == {"0": 7, "1": 3} and rows.counts(60) == {"0": 42, "1": 18}
        with pytest.raises(IndexError, match="row 60 is beyond the 60"):
            rows[60]
        again = pickle.loads(pickle.dumps(rows))
        assert again[59][0].equal(rows[59][0]) and again.fingerprint == rows.fingerprint


class TestRefused:
    @pytest.fixture
    def files(self, tmp_path: Path) -> dict[str, dict[str, Any]]:
        (tmp_path / "a.txt").write_text("a")
        ds(tmp_path / "x.ds")
        indexed(tmp_path / "y")
        indexed(tmp_path / "z")
        places = {"text": "a.txt", "nanoset": "x.ds", "megatron": "y", "several": ""}
        return {
            name: {"dataset": "megatron" if name == "several" else name, "dataset_path": str(tmp_path / place)}
            for name, place in places.items()
        }

    @pytest.mark.parametrize(
        ("names", "more", "options", "key", "message"),
        [
            (["text"], {}, {}, "data.order", "text has none"),
            (["nanoset", "megatron"], {}, {}, "data.order", "no program reads nanoset and megatron together"),
            (["nanoset"], {}, {"packing": "documents"}, "data.packing", "documents is not defined"),
            (
                ["megatron", "megatron"],
                {"name": "b", "order_seed": 3},
                {},
                "data.sources[1].order_seed",
                "all the same",
            ),
            (["megatron", "megatron"], {"name": "b", "from_step": 9}, {}, "data.sources[1].from_step", "no stages"),
            (["several"], {}, {}, "data.sources[0].dataset_path", "holds 2 data sets"),
            (
                ["megatron"],
                {"part": "valid"},
                {"order": "native"},
                "data.sources[0].split",
                "say which split part is of",
            ),
            (["megatron"], {}, {"global_batch_size": -1}, "training.global_batch_size", "give it as a number"),
            (
                ["text", "nanoset"],
                {"order_seed": 1},
                {"order": "native"},
                "data.sources[1].order_seed",
                '"source" only',
            ),
        ],
    )
    def test_what_no_order_is_defined_for(
        self,
        files: dict[str, dict[str, Any]],
        names: list[str],
        more: dict[str, Any],
        options: dict[str, Any],
        key: str,
        message: str,
    ) -> None:
        tables = [files[name] for name in names]
        tables[-1] = {**tables[-1], **more}
        asked: dict[str, Any] = {"order": "source", "packing": "concat", "global_batch_size": 4, **options}
        with pytest.raises(ConfigError, match=message) as error:
            check_order(plan_blend(tables, "raise"), **asked)
        assert error.value.key == key

    def test_what_is_fine(self, files: dict[str, dict[str, Any]]) -> None:
        for name in ("nanoset", "megatron"):
            blend = plan_blend([files[name]], "raise")
            check_order(blend, order="source", packing="concat", global_batch_size=4)
            check_order(blend, order="native", packing="documents", global_batch_size=-1)
