import gzip
from pathlib import Path

import pytest

from torchtitan.data.files import (
    Span,
    TextFile,
    find_files,
    line_number,
    plan_pieces,
    read_lines,
    read_passages,
    refuse_early,
    refuse_other_kinds,
)
from torchtitan.errors import ConfigError

SUFFIXES = [".txt"]


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(path: Path | str) -> str:
    with pytest.raises(ConfigError) as error:
        find_files(str(path), SUFFIXES)
    assert error.value.key == "training.dataset_path"
    return error.value.problem


class TestFind:
    def names(self, path: Path | str) -> list[str]:
        return [f.name for f in find_files(str(path), SUFFIXES)]

    def test_folder_sorted_below_and_by_suffix(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a/z.txt", "a/b/c.txt", "a/other.md", ".git/x.txt", ".hidden.txt"):
            write(tmp_path / name)
        assert self.names(tmp_path) == ["a/b/c.txt", "a/z.txt", "b.txt"]

    def test_file_of_any_suffix(self, tmp_path: Path) -> None:
        assert self.names(write(tmp_path / "corpus.data")) == ["corpus.data"]

    def test_glob(self, tmp_path: Path) -> None:
        for name in ("x/1.txt", "y/1.txt", "y/2.log"):
            write(tmp_path / name)
        assert self.names(tmp_path / "**" / "*.*") == ["x/1.txt", "y/1.txt", "y/2.log"]
        assert self.names(tmp_path / "?" / "1.txt") == ["x/1.txt", "y/1.txt"]

    def test_nothing_there(self, tmp_path: Path) -> None:
        for path in (tmp_path / "no.txt", tmp_path / "*.txt"):
            problem = refused(path)
            assert str(path) in problem and str(Path.cwd()) in problem

    def test_folder_with_other_suffixes_says_which(self, tmp_path: Path) -> None:
        write(tmp_path / "a.json.gz")
        write(tmp_path / "b.json.gz")
        assert "2 with .gz" in refused(tmp_path)

    def test_nothing_but_empty_files(self, tmp_path: Path) -> None:
        write(tmp_path / "a.txt", "")
        assert "empty" in refused(tmp_path)

    def test_a_link_to_nowhere_is_not_passed_over(self, tmp_path: Path) -> None:
        write(tmp_path / "a.txt")
        (tmp_path / "b.txt").symlink_to("gone")
        assert f"cannot read {tmp_path / 'b.txt'}" in refused(tmp_path)

    @pytest.mark.parametrize(
        ("head", "kind"),
        [
            (b"PAR1\x15\x04", "parquet"),
            (gzip.compress(b"\x00" * 512, mtime=0), "binary"),
            (b"x" * 257 + b"ustar", "tar"),
            (b"PK\x03\x04", "zip"),
            ("hello".encode("utf-16"), "UTF-16"),
            (b"\x93NUMPY\x01\x00", "binary"),
        ],
    )
    def test_other_kinds_are_named(self, tmp_path: Path, head: bytes, kind: str) -> None:
        path = write(tmp_path / "data.txt", head)
        with pytest.raises(ConfigError) as error:
            refuse_early(find_files(str(path), SUFFIXES), refuse_other_kinds)
        assert kind in error.value.problem and str(path) in error.value.problem


class TestPieces:
    def test_each_byte_is_in_one_piece_and_small_files_stay_whole(self) -> None:
        limit = 262_144
        sizes = [0, 10, 3_000_000, 200_000, 100_000, 0, limit, limit + 1, 5]
        files = [TextFile(Path(f"{i}.txt"), f"{i}.txt", size, 0) for i, size in enumerate(sizes)]
        pieces = plan_pieces(files)
        spans = [span for piece in pieces for span in piece]
        for file in files:
            own = [(s.start, s.stop) for s in spans if s.file is file]
            assert own[0][0] == 0 and own[-1][1] == file.size
            assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]
            assert len(own) == 1 or file.size > limit
        assert [s.file.name for s in spans] == sorted(s.file.name for s in spans)
        assert max(sum(s.stop - s.start for s in piece) for piece in pieces) <= limit

    def test_what_cannot_be_cut_is_whole(self) -> None:
        files = [TextFile(Path(f"{i}.gz"), f"{i}.gz", size, 0) for i, size in enumerate([10, 1 << 30, 0, 20])]
        assert plan_pieces(files, {files[1]}) == [
            [Span(files[0], 0, 10)],
            [Span(files[1], 0, 1 << 30)],
            [Span(files[2], 0, 0), Span(files[3], 0, 20)],
        ]

    def test_number_stays_bounded(self) -> None:
        assert len(plan_pieces([TextFile(Path("a.txt"), "a.txt", 10 << 30, 0)])) == 512


CUT_BY = [1, 2, 3, 7, 50, 1000]


def spans_of(path: Path, width: int) -> list[Span]:
    [file] = find_files(str(path), SUFFIXES)
    return [Span(file, start, min(start + width, file.size)) for start in range(0, file.size, width)]


@pytest.mark.parametrize("width", CUT_BY)
@pytest.mark.parametrize("content", ["one\ntwo\n\nthree", "a\n\n\nb\n", "\n", "no newline", "é\r\nü\r\n"])
def test_every_line_is_read_once_wherever_the_file_is_cut(tmp_path: Path, content: str, width: int) -> None:
    path = write(tmp_path / "a.txt", content)
    found = [found for span in spans_of(path, width) for found in read_lines(span)]
    assert [line for _, line in found] == content.encode().splitlines(keepends=True)
    assert all(content.encode()[offset:].startswith(line) for offset, line in found)


@pytest.mark.parametrize("search_bytes", [8, 1 << 16])
@pytest.mark.parametrize("width", CUT_BY)
@pytest.mark.parametrize("content", ["one two\nthree\n\n  four\nfive\n\n\n", "ééé😀ü" * 9, "\n \n \n", "a\nb\nc"])
def test_passages_join_to_the_file_and_split_no_character(
    tmp_path: Path, content: str, width: int, search_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.data.files._SEARCH_BYTES", search_bytes)
    path = write(tmp_path / "a.txt", content)
    passages = [part for span in spans_of(path, width) for part in read_passages(span)]
    assert "".join(part.decode() for _, part, _ in passages) == content
    assert all(content.encode()[offset:].startswith(part) for offset, part, _ in passages)
    assert [ends for _, _, ends in passages] == [False] * (len(passages) - 1) + [True]


@pytest.mark.parametrize(
    ("content", "passages"),
    [
        ("one one one\n\n\n   two two\nthree three\n", ["one one one\n\n\n   two two\n", "three three\n"]),
        ("one one one\n\ntwo two\nthree three\n", ["one one one\n\ntwo two\n", "three three\n"]),
        ("one one one\n\ntwo two\n\nthree\n", ["one one one\n\n", "two two\n\n", "three\n"]),
        ("one one one two two three", ["one one one two two three"]),
    ],
)
def test_passages_are_cut_between_lines(tmp_path: Path, content: str, passages: list[str]) -> None:
    path = write(tmp_path / "a.txt", content)
    parts = [part.decode() for span in spans_of(path, 8) for _, part, _ in read_passages(span)]
    assert [part for part in parts if part] == passages


def test_line_number(tmp_path: Path) -> None:
    [file] = find_files(str(write(tmp_path / "a.txt", "ab\n\ncd\n")), SUFFIXES)
    assert [line_number(file, offset) for offset in range(8)] == [1, 1, 1, 2, 3, 3, 3, 4]
