"""Token files as datatrove writes them and Nanotron's Nanoset reads them: ``X.ds``, ``X.ds.index``, ``X.ds.metadata``.

``X.ds`` has the ids one after the other, ``X.ds.index`` as uint64 the end of each document in tokens, both
little-endian without a header. ``X.ds.metadata`` has three lines: tokenizer|bytes of an id, number of tokens, and that
number for people. What becomes of the tokens does not belong here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.contents import content_hash, sampled_hash
from torchtitan.data.files import KEY
from torchtitan.data.tokens.mapped import MappedTokens
from torchtitan.data.tokens.store import map_array
from torchtitan.errors import ConfigError

_CHUNK = 1 << 20


def index_path(ds: Path) -> Path:
    return ds.with_name(ds.name + ".index")


def metadata_path(ds: Path) -> Path:
    return ds.with_name(ds.name + ".metadata")


def id_dtype(vocab_size: int) -> str:
    """The type in which ids below ``vocab_size`` are stored."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class EndedDocuments:
    """Documents by their ends, ascending; the first begins at 0."""

    def __init__(self, ends: npt.NDArray[Any], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        if first > 0 or last <= first:
            return self._ends[max(first, 1) - 1 : last - 1].astype(np.int64)
        return np.concatenate([np.zeros(1, np.int64), self._ends[: last - 1].astype(np.int64)])

    def holding(self, token: int) -> int:
        return int(np.searchsorted(self._ends, np.uint64(token), side="right"))


class DsFile(MappedTokens):
    """A ``.ds`` file whose index was looked at; ``index_fingerprint`` is None where it has none."""

    def __init__(
        self, path: Path, dtype: str, vocab_size: int, fingerprint: str, index_fingerprint: str | None
    ) -> None:
        documents = None
        if index_fingerprint is not None:
            documents = EndedDocuments(map_array(index_path(path), "<u8"), index_fingerprint)
        super().__init__(path, dtype, vocab_size=vocab_size, documents=documents, fingerprint=fingerprint)
        self._made_of = (path, dtype, vocab_size, fingerprint, index_fingerprint)

    def __reduce__(self) -> tuple[type[DsFile], tuple[Any, ...]]:
        return DsFile, self._made_of


def open_ds(path: Path, dtype: str, *, vocab_size: int, sampled_blocks: int) -> DsFile:
    """The file at ``path``, with its documents where it has an index; ConfigError where that is not its own."""
    index, index_fingerprint = index_path(path), None
    if index.exists():
        _check_index(index, path.stat().st_size // np.dtype(dtype).itemsize)
        index_fingerprint = content_hash(index)
    fingerprint = f"{dtype} {sampled_hash(path, sampled_blocks)}"
    return DsFile(path, dtype, vocab_size, fingerprint, index_fingerprint)


def _check_index(path: Path, tokens: int) -> None:
    size = path.stat().st_size
    if size % 8:
        raise ConfigError(KEY, f"{path} has {size:,} bytes, which are no whole numbers of 8: it is cut off")
    ends = map_array(path, "<u8")
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        raise ConfigError(
            KEY, f"{path} ends its last document at token {last:,}, but the file beside it holds {tokens:,} tokens"
        )
    for first in range(0, len(ends), _CHUNK):
        chunk = ends[max(first - 1, 0) : first + _CHUNK]
        falling = np.flatnonzero(chunk[1:] < chunk[:-1])
        if falling.size:
            document = max(first - 1, 0) + int(falling[0]) + 1
            raise ConfigError(KEY, f"{path}: document {document:,} ends before the one that precedes it")


def read_metadata(ds: Path) -> tuple[str, int, int] | None:
    """Tokenizer, bytes of an id and number of tokens that stand beside ``ds``; None where nothing does."""
    path = metadata_path(ds)
    try:
        lines = path.read_text(errors="replace").splitlines()
        # The name may have bars itself: without one datatrove writes "Unknown Tokenizer|2|2".
        tokenizer, _, id_bytes = lines[0].rpartition("|")
        return tokenizer, int(id_bytes), int(lines[1])
    except FileNotFoundError:
        return None
    except (ValueError, IndexError):
        raise ConfigError(
            KEY, f"{path} does not begin with a line 'tokenizer|bytes of an id' and one with the number of tokens"
        ) from None


class DsWriter:
    """Writes ``X.ds``, its index and its metadata; nothing lies at their names before ``finish``."""

    def __init__(self, path: Path, dtype: str, tokenizer: str) -> None:
        self.path, self.tokens, self.documents = path, 0, 0
        self._dtype, self._tokenizer = dtype, tokenizer
        self._hasher, self._index_hasher = (hashlib.blake2b(digest_size=16) for _ in range(2))
        self._parts = path.with_suffix(".part"), path.with_suffix(".index-part")
        self._files = ExitStack()
        self._file = self._files.enter_context(self._parts[0].open("wb"))
        self._index = self._files.enter_context(self._parts[1].open("wb"))

    @property
    def fingerprint(self) -> str:
        """Hash of all ids."""
        return self._hasher.hexdigest()

    @property
    def index_fingerprint(self) -> str:
        """Hash of the ends of all documents."""
        return self._index_hasher.hexdigest()

    def add(self, ids: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """More ids, and after how many of them documents end, ascending."""
        for content, to, hasher in (
            (ids.astype(self._dtype).data, self._file, self._hasher),
            ((ends + self.tokens).astype("<u8").data, self._index, self._index_hasher),
        ):
            hasher.update(content)
            to.write(content)
        self.tokens += ids.size
        self.documents += ends.size

    def finish(self) -> None:
        """Put all in its place, the ids last."""
        for file in (self._file, self._index):
            file.flush()
            os.fsync(file.fileno())
        self._files.close()
        text = metadata_text(self._tokenizer, np.dtype(self._dtype).itemsize, self.tokens)
        metadata_path(self.path).write_text(text)
        self._parts[1].rename(index_path(self.path))
        self._parts[0].rename(self.path)

    def discard(self) -> None:
        """Leave nothing of it."""
        with contextlib.suppress(OSError):  # of what had no room and has none now
            self._files.close()
        for part in self._parts:
            part.unlink(missing_ok=True)


def metadata_text(tokenizer: str, id_bytes: int, tokens: int) -> str:
    """What ``X.ds.metadata`` holds: no newline at its end."""
    return f"{tokenizer}|{id_bytes}\n{tokens}\n{_for_people(tokens)}"


def _for_people(tokens: int) -> str:
    """Three digits and a prefix, as humanize.metric writes them, with T for token."""
    exponent = len(str(tokens)) - 1
    thousands, digits = divmod(exponent, 3)
    return f"{tokens / 1000**thousands:.{2 - digits}f} {' kMGTPE'[thousands].strip()}T"
