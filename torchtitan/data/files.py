"""Text files as pieces of about equal size: found, told from other kinds, cut and read.

What a record in them is, and what becomes of a bad one, does not belong here.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchtitan.config.paths import local_path
from torchtitan.data.compressed import MAGIC_BYTES, DamagedError, compression, is_decompressed, open_text
from torchtitan.errors import ConfigError, brief

KEY = "training.dataset_path"
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 18, 1 << 25
_MANY_FILES = 32
_SEARCH_BYTES = 1 << 16
_OPENED_AT_ONCE = 16

PLACES_TO_CUT = (r"(?<=\S)\n(?=\S)", r"\n(?=\S)")
"""Ends of lines, best first: after these a tokenizer that splits text as GPT-2 or Llama 3 gives the same ids as
for the text in one, for the first always, for the second nearly."""
_PLACES_TO_CUT = [re.compile(pattern.encode()) for pattern in PLACES_TO_CUT]

_CONVERT = "convert it first"
_READ_IT = "set training.dataset = {}"
_KINDS = (
    (b"PAR1", "a parquet file", _READ_IT.format("parquet")),
    (b"MMIDIDX\x00\x00", "a Megatron index", _READ_IT.format("megatron")),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"ARROW1", "an Arrow file", f"{_READ_IT.format('hub')}, with its folder as path"),
    (b"%PDF-", "a PDF", _CONVERT),
    (b"SQLite format 3\x00", "an SQLite database", _CONVERT),
    (b"\xff\xfe", "text in UTF-16", _CONVERT),
    (b"\xfe\xff", "text in UTF-16", _CONVERT),
)
_TAR_AT, _TAR = 257, b"ustar"


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


def find_files(path: str, suffixes: Sequence[str], more_endings: Sequence[str] = ()) -> list[TextFile]:
    """The file at ``path``, the files below a folder that end in one of ``suffixes``, or what a glob matches.

    After a suffix there may stand one of ``more_endings``. Sorted by name. ConfigError where there is nothing, or
    nothing but empty files.
    """
    given = local_path(path, KEY)
    if given.is_file():
        root, found = given.parent, [given]
    elif given.is_dir():
        root, everything = given, list(_below(given))
        endings = tuple(suffix + more for suffix in suffixes for more in ("", *more_endings))
        found = [p for p in everything if p.name.endswith(endings)]
        if not found:
            others = Counter(p.suffix or "no suffix" for p in everything).most_common(5)
            held = ", ".join(f"{n} with {brief(suffix)}" for suffix, n in others) or "no files at all"
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
            raise cannot_read(error) from None
        files.append(TextFile(file, file.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    files.sort(key=lambda f: f.name)
    if not any(f.size for f in files):
        raise ConfigError(KEY, f"there is no text in {path}: its {len(files)} file(s) are empty")
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Files in a folder and its folders, but for hidden ones."""

    def stop(error: OSError) -> None:
        raise cannot_read(error) from None

    for place, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def cannot_read(error: OSError) -> ConfigError:
    """What is raised where the system does not let a file be opened."""
    why = error.strerror
    if isinstance(error, FileNotFoundError) and os.path.islink(error.filename):
        why = f"it is a symbolic link to {os.readlink(error.filename)}, which is not there"
    return ConfigError(KEY, f"cannot read {error.filename}: {why}")


def refuse_changed(files: Sequence[TextFile]) -> None:
    """ConfigError where one of ``files`` is not what it was when it was found; OSError where it is no more."""
    for file in files:
        status = file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise ConfigError(KEY, f"{file.path} was changed while it was read; start again when it is whole")


def refuse_other_kinds(file: TextFile) -> None:
    """ConfigError that says what ``file`` is, where it is no UTF-8 text, compressed or not."""
    try:
        with open_text(file.path) as stream:
            head = stream.read(1024)
    except OSError as error:
        raise cannot_read(error) from None
    except DamagedError:
        return  # told by who reads what stands before the damage
    kind = kind_of(head)
    if kind is not None:
        raise ConfigError(KEY, f"{file.path} is {kind[0]}; this dataset reads UTF-8 text: {kind[1]}")


def kind_of(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins with ``head``, and what to do about it; None where it may be text."""
    found = next(((kind, remedy) for magic, kind, remedy in _KINDS if head.startswith(magic)), None)
    if found is None and head[_TAR_AT:].startswith(_TAR):
        return "a tar archive", "unpack it first"
    return ("a binary file", _CONVERT) if found is None and b"\x00" in head else found


def refuse_early(files: Sequence[TextFile], refuse: Callable[[TextFile], None]) -> None:
    """Tell of a wrong kind before any work where that is cheap, else it is told when the file's turn comes."""
    for file in files[:_MANY_FILES]:
        refuse(file)


def find_compressed(files: Sequence[TextFile]) -> set[TextFile]:
    """Those of ``files`` that are compressed, and so can be read from their beginning only."""

    def is_compressed(file: TextFile) -> bool:
        try:
            with open(file.path, "rb") as stream:
                return compression(stream.read(MAGIC_BYTES)) is not None
        except OSError as error:
            raise cannot_read(error) from None

    # Only whether a large one may be cut is of interest.
    size = piece_bytes(sum(f.size for f in files))
    large = [file for file in files if file.size > size]
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        return {file for file, found in zip(large, pool.map(is_compressed, large), strict=True) if found}


def piece_bytes(total: int) -> int:
    """How many of ``total`` bytes make a piece."""
    return min(max(total // 512, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)


def plan_pieces(files: Sequence[TextFile], uncut: Collection[TextFile] = ()) -> list[list[Span]]:
    """All files in order, in pieces of about equal size; only a file larger than a piece is cut, and none of ``uncut``.

    A function of the files alone, so that every process plans the same.
    """
    size = piece_bytes(sum(f.size for f in files))
    pieces: list[list[Span]] = []
    room = 0
    for file in files:
        step = file.size if file in uncut else size
        for start in range(0, max(file.size, 1), max(step, 1)):
            stop = min(start + step, file.size)
            if not pieces or stop - start > room:
                pieces.append([])
                room = size
            pieces[-1].append(Span(file, start, stop))
            room -= stop - start
    return pieces


def read_lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Byte offset and bytes of each line that begins inside ``span``; DamagedError as ``open_text``."""
    with open_text(span.file.path) as stream:
        position = 0
        if span.start > 0:
            # The line that holds the byte before belongs to the span before.
            position = stream.seek(span.start - 1)
            position += len(stream.readline())
        to_the_end = is_decompressed(stream)  # its span counts other bytes than those of the text
        while position < span.stop or to_the_end:
            line = stream.readline()
            if not line:
                return
            yield position, line
            position += len(line)


def read_passages(span: Span) -> Iterator[tuple[int, bytes, bool]]:
    """Byte offset and bytes of ``span``, both ends moved to where text may be cut (``_cut``), and if its file is done.

    In one, but for compressed files, which may become large: those come in blocks; DamagedError as ``open_text``.
    """
    with open_text(span.file.path) as stream:
        if is_decompressed(stream):
            yield from _read_blocks(stream)
            return
        start, stop = (_cut(span.file, edge, stream) for edge in (span.start, span.stop))
        stream.seek(start)
        yield start, stream.read(stop - start), span.stop == span.file.size


def _read_blocks(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """All of ``stream``, cut where text may be cut."""
    offset, block = 0, bytearray()
    while found := stream.read1(1 << 18):  # type: ignore[attr-defined]
        block += found
        if len(block) < _MAX_PIECE_BYTES:
            continue
        places = (list(pattern.finditer(block, len(block) // 2)) for pattern in _PLACES_TO_CUT)
        best = next(filter(None, places), None)
        stop = best[-1].end() if best else _whole_characters(block)
        yield offset, bytes(block[:stop]), False
        offset += stop
        del block[:stop]
    yield offset, bytes(block), True


def _whole_characters(block: bytearray) -> int:
    """How many bytes of ``block`` stand before its last character, which may go on."""
    stop = len(block) - 1
    while stop > len(block) - 4 and 0x80 <= block[stop] < 0xC0:
        stop -= 1
    return stop


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
    with open_text(file.path) as stream:
        while offset > 0:
            block = stream.read1(min(offset, 1 << 20))  # type: ignore[attr-defined]
            if not block:
                break
            newlines += block.count(b"\n")
            offset -= len(block)
    return newlines + 1
