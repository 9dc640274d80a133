"""Text files as pieces of about equal size: found, told from other kinds, cut and read.

What a record in them is, and what becomes of a bad one, does not belong here.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchtitan.errors import ConfigError

KEY = "training.dataset_path"
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 18, 1 << 25
_MANY_FILES = 32
_SEARCH_BYTES = 1 << 16

PLACES_TO_CUT = (r"(?<=\S)\n(?=\S)", r"\n(?=\S)")
"""Ends of lines, best first: after these a tokenizer that splits text as GPT-2 or Llama 3 gives the same ids as
for the text in one, for the first always, for the second nearly."""
_PLACES_TO_CUT = [re.compile(pattern.encode()) for pattern in PLACES_TO_CUT]

_KINDS = (
    (b"PAR1", "a parquet file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"PK\x03\x04", "a zip archive"),
    (b"ARROW1", "an Arrow file"),
    (b"%PDF-", "a PDF"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"MMIDIDX\x00\x00", "a Megatron index"),
    (b"\xff\xfe", "text in UTF-16"),
    (b"\xfe\xff", "text in UTF-16"),
)


@dataclass(frozen=True)
class TextFile:
    path: Path
    name: str
    """Relative to what the user gave, so that a moved folder is the same data."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Span:
    """Bytes ``start`` to ``stop`` of a file, before they are moved to where a record begins."""

    file: TextFile
    start: int
    stop: int


def find_files(path: str, suffixes: Sequence[str]) -> list[TextFile]:
    """The file at ``path``, the files below a folder that end in one of ``suffixes``, or what a glob matches.

    Sorted by name. ConfigError where there is nothing, or nothing but empty or binary files.
    """
    given = Path(path).expanduser()
    if given.is_file():
        root, found = given.parent, [given]
    elif given.is_dir():
        root, everything = given, list(_below(given))
        found = [p for p in everything if p.name.endswith(tuple(suffixes))]
        if not found:
            others = Counter(p.suffix or "no suffix" for p in everything).most_common(5)
            held = ", ".join(f"{n} with {suffix}" for suffix, n in others) or "no files at all"
            raise ConfigError(
                KEY,
                f"no file below {path} ends in {', '.join(suffixes)} (found: {held}); "
                "name the endings as data.args.suffixes, or give a glob",
            )
    else:
        found = [Path(p) for p in glob.glob(str(given), recursive=True) if os.path.isfile(p)]
        if not found:
            raise ConfigError(KEY, f"no file, folder or glob matches {path} (working directory {os.getcwd()})")
        root = Path(os.path.commonpath([p.parent for p in found]))
    files = []
    for file in found:
        try:
            status = file.stat()
        except OSError as error:
            raise _cannot_read(error) from None
        files.append(TextFile(file, file.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    files.sort(key=lambda f: f.name)
    if not any(f.size for f in files):
        raise ConfigError(KEY, f"there is no text in {path}: its {len(files)} file(s) are empty")
    # A wrong kind is told before any work where that is cheap, else when the file's turn comes.
    for text_file in files[:_MANY_FILES]:
        refuse_other_kinds(text_file)
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Files in a folder and its folders, but for hidden ones."""

    def stop(error: OSError) -> None:
        raise _cannot_read(error) from None

    for place, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _cannot_read(error: OSError) -> ConfigError:
    return ConfigError(KEY, f"cannot read {error.filename}: {error.strerror}")


def refuse_other_kinds(file: TextFile) -> None:
    """ConfigError that says what ``file`` is, where it is no UTF-8 text."""
    try:
        with open(file.path, "rb") as stream:
            head = stream.read(1024)
    except OSError as error:
        raise _cannot_read(error) from None
    kind = kind_of(head)
    if kind is not None:
        raise ConfigError(KEY, f"{file.path} is {kind[0]}; this dataset reads plain UTF-8 text: {kind[1]}")


def kind_of(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins with ``head``, and what to do about it; None where it may be text."""
    found = next((kind for magic, kind in _KINDS if head.startswith(magic)), None)
    if found is None and b"\x00" in head:
        found = "a binary file"
    return None if found is None else (found, "convert it first")


def plan_pieces(files: Sequence[TextFile]) -> list[list[Span]]:
    """All files in order, in pieces of about equal size; only a file larger than a piece is cut.

    A function of the sizes alone, so that every process plans the same.
    """
    piece_bytes = min(max(sum(f.size for f in files) // 512, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
    pieces: list[list[Span]] = []
    room = 0
    for file in files:
        for start in range(0, max(file.size, 1), piece_bytes):
            stop = min(start + piece_bytes, file.size)
            if not pieces or stop - start > room:
                pieces.append([])
                room = piece_bytes
            pieces[-1].append(Span(file, start, stop))
            room -= stop - start
    return pieces


def read_lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Byte offset and bytes of each line that begins inside ``span``."""
    with open(span.file.path, "rb") as stream:
        position = 0
        if span.start > 0:
            # The line that holds the byte before belongs to the span before.
            position = stream.seek(span.start - 1)
            position += len(stream.readline())
        while position < span.stop:
            line = stream.readline()
            if not line:
                return
            yield position, line
            position += len(line)


def read_passage(span: Span) -> tuple[int, bytes]:
    """Byte offset and bytes of ``span``, both ends moved to where text may be cut (``_cut``)."""
    with open(span.file.path, "rb") as stream:
        start, stop = (_cut(span.file, edge, stream) for edge in (span.start, span.stop))
        stream.seek(start)
        return start, stream.read(stop - start)


def _cut(file: TextFile, offset: int, stream: BinaryIO) -> int:
    """First place from ``offset`` on that is fit to cut text at (``PLACES_TO_CUT``), in the bytes that follow.

    Where they have none: the end of the file if that is near, else the next character.
    """
    if offset in (0, file.size):
        return offset
    before = max(offset - 2, 0)  # what stands before a newline at offset - 1
    stream.seek(before)
    window = stream.read(_SEARCH_BYTES)
    for pattern in _PLACES_TO_CUT:
        place = pattern.search(window, offset - 1 - before)
        if place:
            return before + place.end()
    if len(window) < _SEARCH_BYTES:
        return file.size
    # UTF-8: bytes 0b10xxxxxx go on with the character before them.
    begun = re.compile(rb"[^\x80-\xbf]").search(window, offset - before)
    return before + begun.start() if begun else offset


def line_number(file: TextFile, offset: int) -> int:
    """Line, counted from 1, in which byte ``offset`` stands. Reads all that is before it."""
    newlines = 0
    with open(file.path, "rb") as stream:
        while offset > 0:
            block = stream.read(min(offset, 1 << 20))
            if not block:
                break
            newlines += block.count(b"\n")
            offset -= len(block)
    return newlines + 1
