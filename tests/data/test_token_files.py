import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.data.token_files import (
    BAD,
    DOCUMENTS,
    ds,
    ids,
    indexed,
    message,
    opened,
    raw_idx,
    source,
    starts,
)
from torchtitan.data.tokens.megatron import read_header
from torchtitan.errors import ConfigError
from torchtitan.log import logger

GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0200000000000000 0300000000000000 03000000 02000000 0000000000000000"
    "0600000000000000 0000000000000000 0100000000000000 0200000000000000"
)


class TestGoldenBytes:
    def test_ds(self, tmp_path: Path) -> None:
        path = ds(tmp_path / "x.ds")
        assert path.read_bytes().hex() == "05000600070008000900"
        assert (tmp_path / "x.ds.index").read_bytes().hex() == "03000000000000000500000000000000"
        assert (tmp_path / "x.ds.metadata").read_text() == "a|b|2\n5\n5.00 T"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.ds", "x.ds.index", "x.ds.metadata"]

    def test_idx(self, tmp_path: Path) -> None:
        indexed(tmp_path / "x")
        assert (tmp_path / "x.bin").read_bytes().hex() == "05000600070008000900"
        assert (tmp_path / "x.idx").read_bytes() == GOLDEN_IDX
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]

    def test_empty_documents_have_a_bound_and_no_sequence(self, tmp_path: Path) -> None:
        indexed(tmp_path / "x", [[], [1, 2], [], [3], []])
        header = read_header(tmp_path / "x")
        assert header.lengths().tolist() == [2, 1] and header.pointers().tolist() == [0, 4]
        assert header.documents().tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("documents", [DOCUMENTS, [[1]], [[], [1, 2], [], [], [3], []]])
@pytest.mark.parametrize(
    ("name", "dtype"), [("nanoset", "<u2"), ("nanoset", "<u4"), ("megatron", "<u2"), ("megatron", "<i4")]
)
def test_ids_and_documents_come_back(tmp_path: Path, name: str, documents: list[list[int]], dtype: str) -> None:
    path = ds(tmp_path / "x.ds", documents, dtype) if name == "nanoset" else indexed(tmp_path / "x", documents, dtype)
    tokens = opened(name, path)
    flat = [i for document in documents for i in document]
    assert ids(tokens) == flat and tokens.documents is not None
    owners = [d for d, document in enumerate(documents) for _ in document]
    assert [tokens.documents.holding(t) for t in range(len(flat))] == owners
    edges = np.cumsum([0, *map(len, documents)]).tolist()
    assert starts(tokens) == edges[:-1]
    assert tokens.documents.starts(1, len(documents)).tolist() == edges[1:-1]
    assert tokens.window(len(flat) - 1, 3).tolist() == [(flat * 3)[(len(flat) - 1 + k)] for k in range(3)]
    again = pickle.loads(pickle.dumps(tokens))
    assert ids(again) == flat and starts(again) == edges[:-1]
    assert (again.fingerprint, again.documents.fingerprint) == (tokens.fingerprint, tokens.documents.fingerprint)


class TestSeveralFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for number, documents in enumerate([[[1, 2], [3]], [[4]], [[5, 6], []]]):
            ds(tmp_path / f"{number}.ds", documents)
            indexed(tmp_path / f"{number}", documents)
        (tmp_path / "all.ds.metadata").write_text("a|2\n6\n6.00 T")  # of a folder, beside no file of its name
        return tmp_path

    @pytest.mark.parametrize("name", ["nanoset", "megatron"])
    def test_are_one_by_name(self, folder: Path, name: str) -> None:
        tokens = opened(name, folder)
        assert ids(tokens) == [1, 2, 3, 4, 5, 6] and starts(tokens) == [0, 2, 3, 4, 6]
        for start in range(7):
            for length in range(15):
                assert tokens.window(start, length).tolist() == [1 + (start + k) % 6 for k in range(length)]
        assert tokens.documents is not None
        assert [tokens.documents.holding(t) for t in range(6)] == [0, 0, 1, 2, 3, 3]
        assert tokens.documents.starts(1, 4).tolist() == [2, 3, 4]
        assert ids(pickle.loads(pickle.dumps(tokens))) == [1, 2, 3, 4, 5, 6]

    def test_by_glob(self, folder: Path) -> None:
        assert ids(opened("nanoset", folder / "[12]*")) == [4, 5, 6]
        assert ids(opened("megatron", folder / "[02].idx")) == [1, 2, 3, 5, 6]

    def test_of_one_without_an_index_no_documents_are_known(self, folder: Path) -> None:
        (folder / "1.ds.index").unlink()
        found = source("nanoset", folder)
        assert found.open(100).documents is None and "documents unknown" in found.description

    @pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
    def test_one_of_megatrons_by_any_of_its_names(self, folder: Path, ending: str) -> None:
        assert ids(opened("megatron", folder / f"0{ending}")) == [1, 2, 3]


class TestFingerprint:
    def test_is_of_the_content_alone(self, tmp_path: Path) -> None:
        prints = []
        for folder in (tmp_path / "a", tmp_path / "b"):
            folder.mkdir()
            prints.append([opened("nanoset", ds(folder / "x.ds")), opened("megatron", indexed(folder / "y"))])
        for a, b in zip(*prints, strict=True):
            assert a.documents and b.documents
            assert (a.fingerprint, a.documents.fingerprint) == (b.fingerprint, b.documents.fingerprint)

    def test_tells_other_ids_and_other_documents(self, tmp_path: Path) -> None:
        def prints(documents: list[list[int]], name: str) -> tuple[str, str]:
            path = ds(tmp_path / "x.ds", documents) if name == "nanoset" else indexed(tmp_path / "x", documents)
            tokens = opened(name, path)
            assert tokens.documents
            return tokens.fingerprint, tokens.documents.fingerprint

        for name in ("nanoset", "megatron"):
            first, other_ids, other_documents = (
                prints(documents, name) for documents in (DOCUMENTS, [[5, 6, 7], [8, 1]], [[5, 6], [7, 8, 9]])
            )
            assert first[0] != other_ids[0] and first[1] == other_ids[1]
            assert first[0] == other_documents[0] and first[1] != other_documents[1]


class TestTypesOfMegatron:
    @pytest.mark.parametrize(
        ("code", "dtype"),
        [(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (6, "f8"), (7, "f4"), (8, "u2")],
    )
    def test_all_are_read_and_checked(self, tmp_path: Path, code: int, dtype: str) -> None:
        prefix = raw_idx(tmp_path / "x", np.array([1, 2, 3, 99, 4], dtype), code, [2, 3], [0, 1, 2])
        assert ids(opened("megatron", prefix)) == [1, 2, 3, 99, 4]
        with pytest.raises(ConfigError, match=r"x\.bin: token 3 \(document 1\) is 99(\.0)?, which is no id .* of 99;"):
            opened("megatron", prefix, vocab_size=99).window(2, 2)

    @pytest.mark.parametrize(
        ("code", "bad", "dtype"), [(2, -1, "i1"), (5, -7, "i8"), (6, 1.5, "f8"), (7, np.nan, "f4")]
    )
    def test_what_is_no_id(self, tmp_path: Path, code: int, bad: float, dtype: str) -> None:
        tokens = opened("megatron", raw_idx(tmp_path / "x", np.array([1, bad, 3], dtype), code, [3], [0, 1]))
        assert tokens.window(2, 2).tolist() == [3, 1]
        with pytest.raises(ConfigError, match=rf"token 1 \(document 0\) is {bad}"):
            tokens.window(2, 3)

    def test_documents_of_several_sequences_and_modes(self, tmp_path: Path) -> None:
        array = np.arange(10, dtype="<u2")
        tokens = opened("megatron", raw_idx(tmp_path / "x", array, 8, [1, 0, 4, 5], [0, 3, 3, 4], modes=bytes(4)))
        assert starts(tokens) == [0, 5, 5] and tokens.documents
        assert [tokens.documents.holding(t) for t in range(10)] == [0] * 5 + [2] * 5


class TestShares:
    """Parts of a split, of two files of 6 and 4 sequences in documents of one or several."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        raw_idx(tmp_path / "a", np.arange(21, dtype="<u2"), 8, [1, 2, 3, 4, 5, 6], [0, 2, 5, 5, 6])
        raw_idx(tmp_path / "b", np.arange(30, 40, dtype="<u2"), 8, [3, 3, 3, 1], [0, 1, 2, 3, 4])
        return tmp_path

    def parts(self, folder: Path, split: str) -> list[list[int]]:
        opened_parts = [opened("megatron", folder, split=split, part=part) for part in ("train", "valid", "test")]
        return [part.window(0, len(part)).tolist() for part in opened_parts]

    def test_are_sequences_of_each_file(self, folder: Path) -> None:
        train, valid, test = self.parts(folder, "50, 25, 25")
        # Of a: 3, 1 (4.5 rounds to 4) and 2 sequences; of b: 2, 1 and 1.
        assert train == [*range(6), *range(30, 36)]
        assert valid == [*range(6, 10), *range(36, 39)] and test == [*range(10, 21), 39]

    def test_one_of_the_two_options_is_enough(self, folder: Path) -> None:
        everything = opened("megatron", folder)
        assert len(everything) == 31
        valid = opened("megatron", folder, part="valid", split="0, 1")
        assert valid.window(0, 31).tolist() == everything.window(0, 31).tolist()
        assert len(opened("megatron", folder, split="1")) == 31 and len(opened("megatron", folder, part="train")) == 31

    def test_documents_are_cut_where_a_part_ends(self, folder: Path) -> None:
        whole = opened("megatron", folder / "a").documents
        part = opened("megatron", folder / "a", split="2, 2, 2", part="valid")
        # Sequences 2 and 3, which are tokens 3 to 9 of the second document, which goes on to token 14.
        assert part.window(0, 7).tolist() == [*range(3, 10)] and part.window(5, 4).tolist() == [8, 9, 3, 4]
        assert part.documents is not None and len(part.documents) == 1
        assert part.documents.starts(0, 1).tolist() == [0] and part.documents.holding(6) == 0
        early = opened("megatron", folder / "a", split="4, 2").documents
        assert early is not None and whole is not None
        assert early.starts(0, 9).tolist() == [0, 3] and whole.starts(0, 9).tolist() == [0, 3, 15, 15]
        assert [early.holding(token) for token in (0, 2, 3, 9)] == [0, 0, 1, 1]

    def test_tell_each_other_apart(self, folder: Path) -> None:
        found = [
            opened("megatron", folder / "a", split=split, part=part)
            for split, part in (("1", "train"), ("4, 2", "train"), ("4, 2", "valid"), ("4, 1, 1", "valid"))
        ]
        assert len({part.fingerprint for part in found}) == 4
        assert len({part.documents.fingerprint for part in found if part.documents is not None}) == 4

    def test_travel_as_paths(self, folder: Path) -> None:
        for tokens in (opened("megatron", folder), opened("megatron", folder, split="50, 25, 25")):
            content = pickle.dumps(tokens)
            copy = pickle.loads(content)
            assert copy.window(3, 9).tolist() == tokens.window(3, 9).tolist()
            assert copy.documents.starts(0, 9).tolist() == tokens.documents.starts(0, 9).tolist()
            assert b"ndarray" not in content

    def test_without_tokens_is_refused(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"'1, 0, 0' gives test no token of .*") as error:
            opened("megatron", folder, split="1, 0, 0", part="test")
        assert error.value.key == "data.args.split"
        with pytest.raises(ConfigError, match="no list of up to three shares"):
            opened("megatron", folder, split="many")


def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Sparse files: 6 GiB that take no room."""
    tokens = 3 << 30
    for path in (tmp_path / "x.ds", tmp_path / "x.bin"):
        with open(path, "wb") as file:
            file.seek(2 * (tokens - 2))
            file.write(np.array([7, 8], "<u2").tobytes())
    (tmp_path / "x.ds.index").write_bytes(np.array([tokens - 2, tokens], "<u8").tobytes())
    (tmp_path / "x.ds.metadata").write_text(f"a|2\n{tokens}\nmany")
    lengths = [(1 << 31) - 1, tokens - (1 << 31) - 1, 2]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 3)
    pointers = np.array([0, 2 * lengths[0], 2 * (tokens - 2)], "<i8").tobytes()
    (tmp_path / "x.idx").write_bytes(
        head + np.array(lengths, "<i4").tobytes() + pointers + np.array([0, 2, 3], "<i8").tobytes()
    )
    for name, path in (("nanoset", tmp_path / "x.ds"), ("megatron", tmp_path / "x")):
        found = opened(name, path)
        assert len(found) == tokens and found.window(tokens - 3, 5).tolist() == [0, 7, 8, 0, 0]
        assert starts(found) == [0, tokens - 2] and found.documents and found.documents.holding(tokens - 2) == 1
        with pytest.raises(ConfigError, match=r"token 3,221,225,471 \(document 1\) is 8"):
            opened(name, path, vocab_size=8).window(tokens - 4, 4)


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_told_by_name(tmp_path: Path, case: str) -> None:
    error = message(case, tmp_path)
    assert re.search(BAD[case][2], error.problem)
    assert error.key == "training.dataset_path" and "\n" not in str(error)


def test_what_says_nothing_of_its_ids_is_read_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    path = ds(tmp_path / "x.ds", dtype="<u4")
    with pytest.raises(ConfigError, match=r"metadata says 4; leave this out") as error:
        opened("nanoset", path, token_bytes=2)
    assert error.value.key == "data.args.token_bytes"
    (tmp_path / "x.ds.metadata").unlink()
    assert ids(opened("nanoset", path, token_bytes=4)) == [5, 6, 7, 8, 9]
    (tmp_path / "x.ds.loss").write_bytes(bytes(5))
    assert ids(opened("nanoset", path, token_bytes=4)) == [5, 6, 7, 8, 9]
    assert len(warnings) == 1 and "x.ds.loss is not read" in warnings[0]
