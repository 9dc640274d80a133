"""What a stream's journal says: how much of the stream is there, piece by piece, and the hash of each piece.

Who writes it, and what becomes of files that are not what it says, does not belong here.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

from torchtitan.data.tokens.datatrove import index_path

_HASH_BYTES = 16
_RECORD = struct.Struct(f"<6Q{_HASH_BYTES}s8s")
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True)
class Progress:
    """What of a stream is there, counted from its beginning; ``ended`` is 1 where that is all of it."""

    tokens: int = 0
    documents: int = 0
    records: int = 0
    skipped: int = 0
    text_bytes: int = 0
    ended: int = 0


def record(progress: Progress, ids: bytes, ends: bytes) -> bytes:
    """What is written down when a piece, of these bytes of ids and of ends of documents, has led to ``progress``."""
    content = struct.pack("<6Q", *astuple(progress)) + _hash(ids, ends)
    return content + _check(content)


def _hash(ids: bytes, ends: bytes) -> bytes:
    return hashlib.blake2b(ids + ends, digest_size=_HASH_BYTES).digest()


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def _read_record(file: BinaryIO, number: int) -> tuple[Progress, bytes] | None:
    """Record ``number``, counted from 1, and its piece's hash; None where it is not whole, or of an older format."""
    content = os.pread(file.fileno(), _RECORD.size, (number - 1) * _RECORD.size)
    if len(content) < _RECORD.size:
        return None
    *numbers, piece, check = _RECORD.unpack(content)
    return (Progress(*numbers), piece) if check == _check(content[:-8]) else None


def read_journal(path: Path) -> tuple[Progress, int]:
    """The last whole record of a journal, and how many there are up to it."""
    try:
        with open(path, "rb") as file:
            # The last one may have been torn by a loss of power.
            for number in range(os.fstat(file.fileno()).st_size // _RECORD.size, 0, -1):
                found = _read_record(file, number)
                if found is not None:
                    return found[0], number
    except FileNotFoundError:
        pass
    return Progress(), 0


def damage(ds: Path, id_bytes: int, most_bytes: int) -> str | None:
    """What is wrong with the files of the stream at ``ds``, of whose pieces the last ``most_bytes`` are looked at;
    None where they are what their journal says, or there is none."""
    journal = ds.with_suffix(".journal")
    after, pieces = read_journal(journal)
    if pieces == 0:
        torn = not journal.exists() or journal.stat().st_size < _RECORD.size
        return None if torn else "its journal is damaged, or of an older version"
    try:
        with open(journal, "rb") as file, open(ds, "rb") as ids, open(index_path(ds), "rb") as ends:
            for number in range(pieces, 0, -1):
                found = _read_record(file, number)
                known = (Progress(), b"") if number == 1 else _read_record(file, number - 1)
                if found is None or known is None:
                    return "its journal is damaged"
                (after, piece), (before, _) = found, known
                if most_bytes < 0:
                    return None
                tokens, documents = after.tokens - before.tokens, after.documents - before.documents
                added = (
                    os.pread(ids.fileno(), tokens * id_bytes, before.tokens * id_bytes),
                    os.pread(ends.fileno(), documents * 8, before.documents * 8),
                )
                if _hash(*added) != piece:
                    return f"its tokens {before.tokens:,} to {after.tokens:,} are not what was written"
                most_bytes -= len(added[0]) + len(added[1])
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    return None
