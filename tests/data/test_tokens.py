import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from torchtitan.data.datasets import DATASETS, Passage, Skipped
from torchtitan.data.tokenizer import TOKENIZERS
from torchtitan.data.tokenizers.utf8 import BytesTokenizer
from torchtitan.data.tokens import encode
from torchtitan.data.tokens.cache import TokenFile, open_tokens
from torchtitan.data.tokens.datatrove import index_path
from torchtitan.data.tokens.encode import Encoding, Piece
from torchtitan.errors import ConfigError
from torchtitan.log import logger

DOCUMENTS = ["one two", "", "three\n\nfour é", "five" * 50]


class Listed:
    """A source of given documents, some to a piece; says in a file who read which piece."""

    name = "listed"
    description = "for a test"

    def __init__(
        self, documents: list[Any], *, per_piece: int = 1, log: Path | None = None, seconds: float = 0
    ) -> None:
        self.fingerprint = hashlib.sha256(repr(documents).encode()).hexdigest()
        self.num_pieces = -(-len(documents) // per_piece)
        self._documents, self._per_piece, self._log, self._seconds = documents, per_piece, log, seconds

    def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
        if self._log is not None:
            with open(self._log, "a") as log:
                log.write(f"{os.getpid()} {piece}\n")
        time.sleep(self._seconds)
        yield from self._documents[piece * self._per_piece : (piece + 1) * self._per_piece]


class Wide(BytesTokenizer):
    vocab_size = 100_000
    fingerprint = "wide"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[70_000 + byte for byte in text.encode()] for text in texts]


BYTES = Encoding(BytesTokenizer(), None, None)


def opened(folder: Path, documents: list[Any] = DOCUMENTS, **options: Any) -> TokenFile:
    arguments = {"tokenizer": BytesTokenizer(), "bos_id": 256, "eos_id": 257, "cache_folder": str(folder), **options}
    encoding = Encoding(*(arguments.pop(name) for name in ("tokenizer", "bos_id", "eos_id")))
    return open_tokens(Listed(documents), encoding, **arguments)


def ids(file: TokenFile) -> list[int]:
    return file.window(0, len(file)).tolist()


def expected(documents: list[str], bos: list[int], eos: list[int]) -> list[int]:
    return [i for text in documents for i in bos + list(text.encode()) + eos]


@pytest.mark.parametrize("bos", [None, 256])
@pytest.mark.parametrize("eos", [None, 257])
def test_documents_in_order_each_with_its_ends(tmp_path: Path, bos: int | None, eos: int | None) -> None:
    file = opened(tmp_path, bos_id=bos, eos_id=eos)
    assert ids(file) == expected(DOCUMENTS, [] if bos is None else [bos], [] if eos is None else [eos])
    assert (file.header.documents, file.header.text_bytes) == (4, sum(len(d.encode()) for d in DOCUMENTS))


def test_a_document_in_passages_has_one_beginning_and_one_end(tmp_path: Path) -> None:
    parts = [Passage("a", True, False), Passage("", False, False), Passage("b", False, True), "c"]
    file = opened(tmp_path, parts)
    assert ids(file) == expected(["ab", "c"], [256], [257])
    assert file.header.documents == 2


@pytest.mark.parametrize("split", ["Llama 3", "GPT-2"])
def test_long_documents_are_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    """Their ids are those of the document in one, for tokenizers that merge."""
    tokenizer = TOKENIZERS.bind("hf", {}, key="tokenizer")("")
    if split == "GPT-2":
        tokenizer._rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "".join(f"import a\nimport b\n\n\ndef f{i}(x):\n\n\n    return {i} + x\n  \n" for i in range(300))
    whole = opened(tmp_path / "whole", [text, "x"], tokenizer=tokenizer)
    monkeypatch.setattr(encode, "_SEGMENT_CHARACTERS", 500)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 2000)
    segments = [segment for segment, _, _ in encode.segments_of(Passage(text, True, True))]
    assert len(segments) > 20 and all(segment.startswith("import b") for segment in segments[1:])
    parts = opened(tmp_path / "parts", [text, "x"], tokenizer=tokenizer)
    assert ids(parts) == ids(whole)


@pytest.mark.parametrize("text", ["word ", "word\n\n", "\n", "ééé"])
def test_text_without_a_good_place_to_cut_is_cut_all_the_same(text: str) -> None:
    size = encode._SEGMENT_CHARACTERS
    text = text * (5 * size // len(text))
    segments = list(encode.segments_of(Passage(text, True, False)))
    assert "".join(segment for segment, _, _ in segments) == text
    assert len(segments) >= 3 and max(len(segment) for segment, _, _ in segments) <= 2 * size
    assert [(opens, closes) for _, opens, closes in segments] == [(i == 0, False) for i in range(len(segments))]


class TestWindow:
    def test_goes_round(self, tmp_path: Path) -> None:
        file = opened(tmp_path, ["abc"], bos_id=None, eos_id=None)
        assert file.window(1, 2).tolist() == [98, 99]
        assert file.window(2, 8).tolist() == [99, 97, 98, 99, 97, 98, 99, 97]
        assert file.window(3 * 10**15 + 1, 1).tolist() == [98]

    def test_wide_ids(self, tmp_path: Path) -> None:
        file = opened(tmp_path, ["abc"], tokenizer=Wide(), bos_id=None, eos_id=99_999)
        assert ids(file) == [70_097, 70_098, 70_099, 99_999]
        assert (file.header.dtype, file.path.stat().st_size) == ("<u4", 16)
        assert opened(tmp_path).header.dtype == "<u2"

    def test_survives_a_pickle_without_its_content(self, tmp_path: Path) -> None:
        file = opened(tmp_path, ["abc" * 10_000])
        packed = pickle.dumps(file)
        assert len(packed) < 2000
        assert ids(pickle.loads(packed)) == ids(file)


class TestCache:
    def test_second_time_reads_no_text(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        for _ in range(2):
            file = open_tokens(Listed(DOCUMENTS, log=log), BYTES, cache_folder=str(tmp_path))
        assert len(log.read_text().splitlines()) == len(DOCUMENTS)
        assert sorted(p.suffix for p in tmp_path.iterdir()) == ["", ".ds", ".index", ".json", ".metadata"]
        assert json.loads(file.path.with_suffix(".json").read_text())["tokens"] == len(file)

    def test_is_by_all_that_the_ids_depend_on(self, tmp_path: Path) -> None:
        files = [
            opened(tmp_path),
            opened(tmp_path, DOCUMENTS[1:]),
            opened(tmp_path, bos_id=None),
            opened(tmp_path, eos_id=300),
            opened(tmp_path, tokenizer=Wide()),
        ]
        assert len({file.path for file in files}) == len({file.fingerprint for file in files}) == len(files)

    def test_fingerprint_is_of_the_ids_alone(self, tmp_path: Path) -> None:
        assert opened(tmp_path, ["a", "b"], bos_id=None, eos_id=None).fingerprint == (
            opened(tmp_path, ["ab"], bos_id=None, eos_id=None).fingerprint
        )

    def test_damage_is_mended_with_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        warned: list[str] = []
        monkeypatch.setattr(logger, "warning", warned.append)
        path, header = opened(tmp_path).path, opened(tmp_path).path.with_suffix(".json")
        good, index = (path.read_bytes(), header.read_bytes()), index_path(path).read_bytes()

        def cut_tokens() -> None:
            os.truncate(path, path.stat().st_size - 2)

        def cut_header() -> None:
            os.truncate(header, 30)

        def foreign_header() -> None:
            header.write_text("[]")

        def zero_index() -> None:
            index_path(path).write_bytes(bytes(index_path(path).stat().st_size))

        def one_number_of_the_index() -> None:
            ends = np.fromfile(index_path(path), "<u8")
            ends[1] += 1
            ends.tofile(index_path(path))

        def another_index_in_the_header() -> None:
            told = json.loads(good[1])
            header.write_text(json.dumps({**told, "index_fingerprint": told["fingerprint"]}))

        kinds = (
            cut_tokens,
            cut_header,
            foreign_header,
            zero_index,
            one_number_of_the_index,
            another_index_in_the_header,
        )
        for number, damage in enumerate(kinds, start=1):
            damage()
            assert ids(opened(tmp_path)) == expected(DOCUMENTS, [256], [257])
            assert (path.read_bytes(), header.read_bytes()) == good and index_path(path).read_bytes() == index
            assert len(warned) == number and str(path) in warned[-1]
        for lost in (path, header):
            lost.unlink()
            assert ids(opened(tmp_path)) == expected(DOCUMENTS, [256], [257])

    def test_default_is_the_users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert opened(Path(""), cache_folder="").path.parent == tmp_path / "xdg" / "torchtitan" / "tokens"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert opened(Path(""), cache_folder="").path.parent == tmp_path / "home" / ".cache" / "torchtitan" / "tokens"

    def test_folder_that_cannot_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="name another folder") as error:
            opened(tmp_path / "file" / "cache")
        assert error.value.key == "data.cache_folder"

    def test_full_disk(self, tmp_path: Path) -> None:
        class Filling(Listed):
            def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
                # From here on what the piece is written to has no room.
                work = next(tmp_path.glob("*.work"))
                (work / f"piece-{piece:06d}.part").symlink_to("/dev/full")
                yield "x" * 100_000

        with pytest.raises(ConfigError, match=r"data\.cache_folder: .*No space left"):
            open_tokens(Filling(["x"]), BYTES, cache_folder=str(tmp_path))


@pytest.mark.parametrize("documents", [[], ["", ""], [Skipped("a:1: bad"), Skipped("a:2: bad")]])
def test_empty_data_sets_are_refused(tmp_path: Path, documents: list[Any]) -> None:
    with pytest.raises(ConfigError, match="the data set is empty") as error:
        opened(tmp_path, documents, bos_id=None, eos_id=None)
    assert error.value.key == "training.dataset_path"
    assert ("a:1: bad" in error.value.problem) == (len(documents) == 2 and documents[0] != "")


def test_skipped_records_are_told_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(logger, "warning", warned.append)
    for _ in range(2):
        file = opened(tmp_path, ["x", Skipped("a.jsonl:2: not JSON"), Skipped("a.jsonl:3: not JSON"), "y"])
    assert ids(file) == expected(["x", "y"], [256], [257])
    assert len(warned) == 2 and all("2 bad records" in w and "a.jsonl:2: not JSON" in w for w in warned)


def test_a_tokenizer_that_breaks_its_word_is_caught(tmp_path: Path) -> None:
    class Liar(Wide):
        vocab_size = 1000

    with pytest.raises(ValueError, match="outside its 1000"):
        opened(tmp_path, tokenizer=Liar())


def tokenise(folder: Path, rank: int, ranks: int) -> None:
    source = Listed([f"document {i} " * 20 for i in range(40)], log=folder / "log", seconds=0.02)
    tokenizer = TOKENIZERS.bind("hf", {}, key="tokenizer")("")
    # All begin at once, as ranks do.
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < ranks:
        time.sleep(0.002)
    encoding = Encoding(tokenizer, 2046, 2047)
    file = open_tokens(source, encoding, cache_folder=str(folder / "cache"), rank=rank, ranks=ranks)
    np.save(folder / f"ids-{rank}.npy", file.window(0, len(file)))


@pytest.mark.parametrize("kill", [False, True])
def test_four_processes_share_one_folder(tmp_path: Path, kill: bool) -> None:
    ranks = 4
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan.data.tokens.cache", "tokenizers"])
    processes = [context.Process(target=tokenise, args=(tmp_path, rank, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()
    if kill:
        while not (tmp_path / "log").exists():
            time.sleep(0.005)
        time.sleep(0.05)
        os.kill(processes[1].pid or 0, signal.SIGKILL)
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0, -signal.SIGKILL if kill else 0, 0, 0]
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".ds", ".index", ".json", ".metadata"]
    results = [np.load(path).tolist() for path in sorted(tmp_path.glob("ids-*.npy"))]
    alone = open_tokens(
        Listed([f"document {i} " * 20 for i in range(40)]),
        Encoding(TOKENIZERS.bind("hf", {}, key="tokenizer")(""), 2046, 2047),
        cache_folder=str(tmp_path / "alone"),
    )
    assert results == [ids(alone)] * (3 if kill else 4)
    readers = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(readers) <= 41, "a piece was made twice though nobody died in it"
    if not kill:
        shares = [readers.count(str(process.pid)) for process in processes]
        assert min(shares) >= 5, shares


def test_python_docs() -> None:
    source = DATASETS.bind("python_docs", {}, key="data.args")(None, "raise")
    tokenizer = TOKENIZERS.bind("hf", {}, key="tokenizer")("")
    file = open_tokens(source, Encoding(tokenizer, 2046, 2047))
    assert 500_000 < len(file) < 2_500_000
    content = file.window(0, len(file))
    assert (content == 2046).sum() == (content == 2047).sum() == file.header.documents
    assert file.header.text_bytes / len(file) > 2.5


@pytest.mark.parametrize("what", ["empty", "zeros", "cut off", "a bit"])
def test_a_piece_that_cannot_be_read_is_made_again(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loss of power may leave one of a run that was ended."""
    warned: list[str] = []
    monkeypatch.setattr(logger, "warning", warned.append)

    class Ending(Listed):
        def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
            if piece == 1:
                raise KeyboardInterrupt
            return super().read(piece)

    with pytest.raises(KeyboardInterrupt):
        open_tokens(Ending(DOCUMENTS), BYTES, cache_folder=str(tmp_path))
    (piece,) = tmp_path.glob("*.work/piece-000000")
    good = piece.read_bytes()
    assert Piece.read(piece).ids.tolist() == list(DOCUMENTS[0].encode())
    place = good.index(DOCUMENTS[0].encode("utf-16-le"))
    changed = {
        "empty": b"",
        "zeros": bytes(len(good)),
        "cut off": good[:-9],
        "a bit": good[:place] + b"#" + good[place + 1 :],
    }
    piece.write_bytes(changed[what])
    assert ids(open_tokens(Listed(DOCUMENTS), BYTES, cache_folder=str(tmp_path))) == expected(DOCUMENTS, [], [])
    assert len(warned) == 1 and f"{piece} is damaged" in warned[0]


def test_ids_that_were_changed_are_made_again(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text to tokenise, once")
    source = DATASETS.bind("text", {}, key="training.dataset")(str(text), "raise")

    def ids() -> list[int]:
        tokens = open_tokens(source, BYTES, cache_folder=str(tmp_path / "cache"))
        return tokens.window(0, len(tokens)).tolist()

    before = ids()
    (file,) = (tmp_path / "cache").glob("*.ds")
    file.write_bytes(bytes(reversed(file.read_bytes())))
    assert ids() == before
