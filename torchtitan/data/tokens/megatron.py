"""Token files as Megatron-LM writes them: ``X.bin`` with the ids, ``X.idx`` with its sequences and documents.

``X.idx``, little-endian: ``MMIDIDX`` and two NULs, uint64 version 1, uint8 type of an id, uint64 S sequences, uint64 D
bounds, int32[S] tokens of each sequence, int64[S] at which byte of ``X.bin`` it begins, int64[D] which sequence each
document begins with (the last bound is S), and int8[S] modes in multimodal sets. The order in which Megatron-LM trains
on them does not belong here.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.contents import content_hash, sampled_hash
from torchtitan.data.files import KEY, cannot_read
from torchtitan.data.tokens.mapped import MappedTokens
from torchtitan.data.tokens.store import map_array
from torchtitan.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_CHUNK = 1 << 20
PARTS = ("train", "valid", "test")


def split_range(split: str, part: str, sequences: int) -> tuple[int, int]:
    """First and last + 1 of the sequences that belong to ``part``; ConfigError where ``split`` is none."""
    try:
        shares = [float(share) for share in split.split(",")]
        if not 1 <= len(shares) <= len(PARTS) or min(shares) < 0 or not 0 < sum(shares) < math.inf:
            raise ValueError
    except ValueError:
        raise ConfigError(
            "data.args.split", f"{split!r} is no list of up to three shares, such as '969, 30, 1'"
        ) from None
    edges = [0.0, *accumulate(share / sum(shares) for share in shares)] + [1.0] * (len(PARTS) - len(shares))
    first, last = (round(edge * float(sequences)) for edge in edges[PARTS.index(part) :][:2])
    return first, last


def id_dtype(vocab_size: int) -> str:
    """The type in which Megatron-LM's tools store ids below ``vocab_size``."""
    return "<u2" if vocab_size < 65500 else "<i4"


@dataclass(frozen=True)
class Header:
    """What the first bytes of ``X.idx`` say, and how large ``X.bin`` must be by its last sequence."""

    prefix: Path
    dtype: str
    sequences: int
    bounds: int

    @property
    def bin(self) -> Path:
        return with_ending(self.prefix, ".bin")

    @property
    def idx(self) -> Path:
        return with_ending(self.prefix, ".idx")

    @property
    def id_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    def lengths(self) -> npt.NDArray[Any]:
        """Tokens of each sequence, ``[sequences]``, mapped; as the two below it does not lie where numbers of its size
        should, so that numpy copies all of it for some functions."""
        return map_array(self.idx, "<i4", offset=_HEADER.size, count=self.sequences)

    def pointers(self) -> npt.NDArray[Any]:
        """Byte of ``X.bin`` at which each sequence begins, ``[sequences]``."""
        return map_array(self.idx, "<i8", offset=_HEADER.size + 4 * self.sequences, count=self.sequences)

    def documents(self) -> npt.NDArray[Any]:
        """Which sequence each document begins with, and the number of sequences, ``[bounds]``."""
        return map_array(self.idx, "<i8", offset=_HEADER.size + 12 * self.sequences, count=self.bounds)


def with_ending(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def read_header(prefix: Path) -> Header:
    """The header of ``prefix``; ConfigError where a file is missing, is another kind, or is cut off."""
    idx, bin = (with_ending(prefix, ending) for ending in (".idx", ".bin"))
    try:
        size, bin_size = idx.stat().st_size, bin.stat().st_size
        with open(idx, "rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise cannot_read(error) from None
    if not head.startswith(_MAGIC):
        raise ConfigError(KEY, f"{idx} does not begin as an index of Megatron's does; was it made by another program?")
    if len(head) < _HEADER.size:
        raise ConfigError(KEY, f"{idx} is cut off: {len(head)} bytes where its header alone has {_HEADER.size}")
    _, version, code, sequences, bounds = _HEADER.unpack(head)
    if version != 1:
        raise ConfigError(KEY, f"{idx} has version {version} of the format; 1 is read")
    if code not in _DTYPES:
        raise ConfigError(KEY, f"{idx} has ids of type {code} (byte 17); known: {', '.join(map(str, _DTYPES))}")
    due = _HEADER.size + 12 * sequences + 8 * bounds
    if size not in (due, due + sequences):
        raise ConfigError(
            KEY,
            f"{idx} has {size:,} bytes where its {sequences:,} sequences and {bounds:,} bounds of documents take "
            f"{due:,} (multimodal: {due + sequences:,}): it is cut off, or was not written to its end",
        )
    header = Header(prefix, _DTYPES[code], sequences, bounds)
    tokens = 0
    if sequences:
        tokens = int(header.pointers()[-1]) // header.id_bytes + int(header.lengths()[-1])
    if bin_size != tokens * header.id_bytes:
        raise ConfigError(
            KEY,
            f"{bin} has {bin_size:,} bytes where its index takes {tokens * header.id_bytes:,} ({tokens:,} tokens of "
            f"{header.id_bytes} bytes): it is cut off, or not the file of this index",
        )
    return header


class IndexedFile(MappedTokens):
    """A ``.bin`` file whose index was looked at (``open_indexed``)."""

    documents: IndexedDocuments

    def __init__(self, header: Header, vocab_size: int, fingerprint: str, index_fingerprint: str) -> None:
        documents = IndexedDocuments(header, index_fingerprint)
        super().__init__(header.bin, header.dtype, vocab_size=vocab_size, documents=documents, fingerprint=fingerprint)
        self.header, self._begins = header, header.pointers()
        self._made_of = (header, vocab_size, fingerprint, index_fingerprint)

    def token_range(self, split: str, part: str) -> tuple[int, int]:
        """First and last + 1 of the tokens of the sequences that belong to ``part``."""
        first, last = split_range(split, part, self.header.sequences)
        return self.begin(first), self.begin(last)

    def begin(self, sequence: int) -> int:
        """The token with which a sequence begins; of the one after the last, the number of tokens."""
        return len(self) if sequence == len(self._begins) else int(self._begins[sequence]) // self.header.id_bytes

    def __reduce__(self) -> tuple[type[IndexedFile], tuple[Any, ...]]:
        return IndexedFile, self._made_of


class IndexedDocuments:
    """Documents of an ``.idx``: each is any number of sequences."""

    def __init__(self, header: Header, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._pointers, self._bounds = header.pointers(), header.documents()
        self._id_bytes, self._tokens = header.id_bytes, header.bin.stat().st_size // header.id_bytes

    def __len__(self) -> int:
        return max(len(self._bounds) - 1, 0)

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        sequences = self._bounds[first : min(last, len(self))]
        found = np.full(len(sequences), self._tokens, np.int64)
        inside = sequences < len(self._pointers)  # documents after the last token begin at the end
        found[inside] = self._pointers[sequences[inside]] // self._id_bytes
        return found

    def holding(self, token: int) -> int:
        # By bisect, for numpy's search copies what lies where it should not (Header).
        sequence = bisect_right(self._pointers, token * self._id_bytes) - 1
        return bisect_right(self._bounds, sequence, 0, len(self)) - 1


def open_indexed(header: Header, *, vocab_size: int, sampled_blocks: int) -> IndexedFile:
    """The tokens of ``header``; ConfigError where its index contradicts itself."""
    _check_bounds(header)
    _check_sequences(header)
    fingerprint = f"{header.dtype} {sampled_hash(header.bin, sampled_blocks)}"
    return IndexedFile(header, vocab_size, fingerprint, content_hash(header.idx))


def _check_bounds(header: Header) -> None:
    bounds, last = header.documents(), 0
    if len(bounds) == 0 or (bounds[0], bounds[-1]) != (0, header.sequences):
        found = f"{bounds[0]:,} to {bounds[-1]:,}" if len(bounds) else "nothing"
        raise ConfigError(
            KEY, f"{header.idx}: bounds of documents go from {found}, not from 0 to its {header.sequences:,} sequences"
        )
    for first, chunk in _chunks(bounds):
        falling = np.flatnonzero(np.diff(chunk, prepend=last) < 0)
        if falling.size:
            raise ConfigError(
                KEY, f"{header.idx}: document {first + int(falling[0]):,} begins before the one it comes after"
            )
        last = int(chunk[-1])


def _check_sequences(header: Header) -> None:
    due = 0
    lengths = header.lengths()
    for first, chunk in _chunks(header.pointers()):
        sizes = lengths[first : first + len(chunk)].astype(np.int64) * header.id_bytes
        ends = due + np.cumsum(sizes)
        wrong = np.flatnonzero((chunk != ends - sizes) | (sizes < 0))
        if wrong.size:
            sequence = int(wrong[0])
            place = f"{header.idx}: sequence {first + sequence:,} "
            if sizes[sequence] < 0:
                raise ConfigError(KEY, f"{place}has {lengths[first + sequence]:,} tokens")
            raise ConfigError(
                KEY,
                f"{place}begins at byte {chunk[sequence]:,}, where the one before it ends at "
                f"{ends[sequence] - sizes[sequence]:,}; was it made by a program that counts in 32 bits? make it again",
            )
        due = int(ends[-1])


def _chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for first in range(0, len(array), _CHUNK):
        yield first, array[first : first + _CHUNK]


class IndexedWriter:
    """Writes ``X.bin`` and ``X.idx``, one sequence a document, none where it is empty; nothing lies at their names
    before ``finish``."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix, self.tokens, self.documents = prefix, 0, 0
        self._dtype = dtype
        self._parts = {ending: with_ending(prefix, f".{ending}-part") for ending in ("bin", "ends", "idx")}
        self._files = ExitStack()
        self._ids = self._files.enter_context(self._parts["bin"].open("wb"))
        self._ends = self._files.enter_context(self._parts["ends"].open("wb"))

    def add(self, ids: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """More ids, and after how many of them documents end, ascending."""
        self._ids.write(ids.astype(self._dtype).data)
        self._ends.write((ends + self.tokens).astype("<i8").data)
        self.tokens += ids.size
        self.documents += ends.size

    def finish(self) -> None:
        """Put all in its place, the index last."""
        self._ends.close()
        with open(self._parts["idx"], "wb") as idx:
            self._write_index(map_array(self._parts["ends"], "<i8"), idx)
            for file in (self._ids, idx):
                file.flush()
                os.fsync(file.fileno())
        self._files.close()
        self._parts["ends"].unlink()
        for ending in ("bin", "idx"):
            self._parts[ending].rename(with_ending(self.prefix, f".{ending}"))

    def discard(self) -> None:
        """Leave nothing of it."""
        with contextlib.suppress(OSError):  # of what had no room and has none now
            self._files.close()
        for part in self._parts.values():
            part.unlink(missing_ok=True)

    def _write_index(self, ends: npt.NDArray[np.int64], idx: Any) -> None:
        def lengths() -> Iterator[npt.NDArray[np.int64]]:
            last = 0
            for _, chunk in _chunks(ends):
                yield np.diff(chunk, prepend=last)
                last = int(chunk[-1])

        sequences, longest = 0, 0
        for found in lengths():
            sequences += int(np.count_nonzero(found))
            longest = max(longest, int(found.max()))
        if longest >= 1 << 31:
            raise ConfigError("training.dataset", f"a document has {longest:,} tokens, and the format counts to 2^31")
        idx.write(_HEADER.pack(_MAGIC, 1, _CODES[self._dtype], sequences, self.documents + 1))
        for found in lengths():
            idx.write(found[found > 0].astype("<i4").data)
        starts = 0
        for found in lengths():
            kept = found[found > 0]
            begin = starts + np.cumsum(kept) - kept
            idx.write((begin * np.dtype(self._dtype).itemsize).astype("<i8").data)
            starts += int(kept.sum())
        idx.write(bytes(8))
        counted = 0
        for found in lengths():
            bounds = counted + np.cumsum(found > 0)
            idx.write(bounds.astype("<i8").data)
            counted = int(bounds[-1])
