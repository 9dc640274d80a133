import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from torchtitan.data import files
from torchtitan.data.compressed import DamagedError, compression, open_text
from torchtitan.data.datasets import DATASETS, Passage, Skipped
from torchtitan.errors import ConfigError

KINDS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
TEXT = "".join(json.dumps({"text": f"document {i} é"}) + "\n" for i in range(3000)).encode()


def read(name: str, path: Path, on_bad_record: str = "raise") -> list[Any]:
    source = DATASETS.bind(name, {}, key="data.args")(str(path), on_bad_record)
    return [document for piece in range(source.num_pieces) for document in source.read(piece)]


@pytest.mark.parametrize("ending", KINDS)
class TestEachKind:
    def write(self, folder: Path, ending: str, content: bytes) -> Path:
        path = folder / f"a.jsonl{ending}"
        path.write_bytes(content)
        return path

    def test_is_told_by_content(self, tmp_path: Path, ending: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(KINDS[ending](TEXT))
        assert compression(path.read_bytes()[:16])
        with open_text(path) as stream:
            assert stream.read() == TEXT
        path.write_bytes(TEXT)
        with open_text(path) as stream:
            assert stream.read() == TEXT

    def test_archives_one_after_the_other(self, tmp_path: Path, ending: str) -> None:
        compress = KINDS[ending]
        path = self.write(tmp_path, ending, compress(TEXT[:1000]) + compress(b"") + compress(TEXT[1000:]))
        with open_text(path) as stream:
            assert stream.read() == TEXT

    def test_cut_anywhere_is_told_after_what_is_whole(self, tmp_path: Path, ending: str) -> None:
        whole = KINDS[ending](TEXT)
        for stop in (30, len(whole) // 2, len(whole) - 1):
            path = self.write(tmp_path, ending, whole[:stop])
            with pytest.raises(ConfigError, match=rf"a\.jsonl{ending}: a.* archive .*truncated; mend it"):
                read("jsonl", path)
            *good, last = read("jsonl", path, "skip")
            assert isinstance(last, Skipped) and "truncated" in str(last)
            assert good == [f"document {i} é" for i in range(len(good))]

    def test_damage_is_told(self, tmp_path: Path, ending: str) -> None:
        whole = KINDS[ending](TEXT)
        middle = len(whole) // 2
        path = self.write(tmp_path, ending, whole[:middle] + bytes(64) + whole[middle + 64 :])
        with pytest.raises(ConfigError, match=rf"a\.jsonl{ending}"):
            read("jsonl", path)
        path = self.write(tmp_path, ending, whole + b"and something that is no archive")
        *good, last = read("jsonl", path, "skip")
        assert len(good) == 3000 and isinstance(last, Skipped) and "damaged after byte" in str(last)

    def test_is_never_cut(self, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A large one is a piece, and its bad lines are counted in the text."""
        monkeypatch.setattr(files, "_MIN_PIECE_BYTES", 100)
        monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 100)
        path = self.write(tmp_path, ending, KINDS[ending](TEXT + b"bad\n"))
        (tmp_path / "b.jsonl").write_bytes(TEXT)
        *good, last = read("jsonl", path, "skip")
        assert good == [f"document {i} é" for i in range(3000)]
        assert str(last).startswith(f"{path}:3001: not JSON")
        assert read("jsonl", tmp_path, "skip") == [*good, last, *good]

    def test_text_comes_in_passages(self, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 1 << 18)
        text = "one line\nand ééé\n" * 60_000
        path = tmp_path / f"a.txt{ending}"
        path.write_bytes(KINDS[ending](text.encode()))
        passages = [p for p in read("text", tmp_path) if isinstance(p, Passage)]
        assert len(passages) > 2 and "".join(p.text for p in passages) == text
        assert [p.opens for p in passages] == [True] + [False] * (len(passages) - 1)
        assert [p.closes for p in passages] == [False] * (len(passages) - 1) + [True]

    def test_a_short_text_is_a_document(self, tmp_path: Path, ending: str) -> None:
        for name, content in (("a", "short é"), ("b", "")):
            (tmp_path / f"{name}.txt{ending}").write_bytes(KINDS[ending](content.encode()))
        assert read("text", tmp_path) == ["short é", ""]


@pytest.mark.parametrize("text", ["ééé😀" * 300_000, "x" * 3_000_000])
def test_text_without_lines_splits_no_character(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_PIECE_BYTES", 1 << 20)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert "".join(p.text for p in read("text", path) if isinstance(p, Passage)) == text


def test_zstandard_of_parallel_compressors_and_with_a_long_window(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"meta"
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    path.write_bytes(skipped + zstandard.ZstdCompressor(compression_params=parameters).compress(TEXT))
    with open_text(path) as stream:
        assert stream.read() == TEXT


def test_what_unfolds_a_thousandfold_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"\x00" * (1 << 26)))
    with open_text(path) as stream:
        raw = stream.raw  # type: ignore[attr-defined]
        stream.read(1)
        assert isinstance(raw, io.RawIOBase) and len(raw._text) < 1 << 26


def test_plain_text_that_begins_like_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("BZh9 is how bzip2 begins")
    assert read("text", tmp_path) == ["BZh9 is how bzip2 begins"]


def test_damage_is_met_again(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"text")[:-3])
    with open_text(path) as stream:
        assert stream.read1() == b"text"  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(DamagedError, match="truncated"):
                stream.read1()  # type: ignore[attr-defined]
