"""Token files mapped into memory: one, several as one circle, and what tells two of them apart.

What the files of a format say beside their ids is in the module of that format.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import resource
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.config.paths import local_path
from torchtitan.data.files import KEY, cannot_read, kind_of
from torchtitan.data.tokens.store import Documents, Tokens, circle_slice, map_array
from torchtitan.errors import ConfigError

_MAPS_OF_A_FILE, _OTHER_DESCRIPTORS = 3, 512


class MappedTokens:
    """The ids of one file. One outside ``vocab_size`` is told when it is read, for reading all of them takes hours."""

    def __init__(
        self, path: Path, dtype: str, *, vocab_size: int, documents: Documents | None, fingerprint: str
    ) -> None:
        self.path, self.documents, self.fingerprint = path, documents, fingerprint
        self._ids, self._vocab_size = map_array(path, dtype), vocab_size
        kind, largest = self._ids.dtype.kind, _largest(self._ids.dtype)
        self._may_exceed, self._may_be_negative = largest is None or largest >= vocab_size, kind != "u"
        self._may_be_broken = kind == "f"

    def __len__(self) -> int:
        return len(self._ids)

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """ConfigError, on ``training.dataset_path``, for an id that the model has not."""
        start %= len(self._ids)
        found = circle_slice(self._ids, start, length)
        # Reductions of the type in the file, called without their wrapper: a tenth of a row's time.
        if found.size and (
            (self._may_exceed and np.maximum.reduce(found) >= self._vocab_size)
            or (self._may_be_negative and np.minimum.reduce(found) < 0)
            or (self._may_be_broken and not np.array_equal(found, np.trunc(found)))
        ):
            self._refuse(found, start)
        return found.astype(np.int64)

    def _refuse(self, found: npt.NDArray[Any], start: int) -> None:
        good = (found >= 0) & (found < self._vocab_size) & (found == np.trunc(found))
        place = int(np.argmin(good))
        token = (start + place) % len(self._ids)
        document = "" if self.documents is None else f" (document {self.documents.holding(token):,})"
        raise ConfigError(
            KEY,
            f"{self.path}: token {token:,}{document} is {found[place]}, which is no id of the model's vocabulary of "
            f"{self._vocab_size:,}; set model.args.vocab_size, or take the files of the model's tokenizer",
        )


def _largest(dtype: np.dtype[Any]) -> int | None:
    return int(np.iinfo(dtype).max) if dtype.kind in "iu" else None


class JoinedTokens:
    """Several token files as one, in the order given."""

    def __init__(self, parts: Sequence[Tokens]) -> None:
        self.parts = list(parts)
        self.fingerprint = _joined(part.fingerprint for part in parts)
        known = [part.documents for part in parts if part.documents is not None]
        starts = list(accumulate((len(part) for part in parts), initial=0))
        self._tokens, self._starts = starts.pop(), starts
        self.documents = _JoinedDocuments(known, starts) if len(known) == len(parts) else None

    def __reduce__(self) -> tuple[type[JoinedTokens], tuple[Any, ...]]:
        return JoinedTokens, (self.parts,)

    def __len__(self) -> int:
        return self._tokens

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        start %= self._tokens
        k = bisect_right(self._starts, start) - 1
        offset = start - self._starts[k]
        if offset + length <= len(self.parts[k]):
            return self.parts[k].window(offset, length)
        pieces = []
        while length > 0:
            taken = min(length, len(self.parts[k]) - offset)
            if taken > 0:
                pieces.append(self.parts[k].window(offset, taken))
            length, k, offset = length - taken, (k + 1) % len(self.parts), 0
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


class PartOfTokens:
    """The tokens ``first`` <= t < ``last`` of others. A document that reaches over either is cut there."""

    def __init__(self, whole: Tokens, first: int, last: int) -> None:
        self._whole, self._first, self._last = whole, first, last
        self.fingerprint = _joined((whole.fingerprint, first, last))
        self.documents = None if whole.documents is None else _PartOfDocuments(whole.documents, first, last)

    def __reduce__(self) -> tuple[type[PartOfTokens], tuple[Any, ...]]:
        return PartOfTokens, (self._whole, self._first, self._last)

    def __len__(self) -> int:
        return self._last - self._first

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        start %= len(self)
        if start + length <= len(self):
            return self._whole.window(self._first + start, length)
        pieces = []
        while length > 0:
            taken = min(length, len(self) - start)
            pieces.append(self._whole.window(self._first + start, taken))
            length, start = length - taken, 0
        return np.concatenate(pieces)


class _PartOfDocuments:
    def __init__(self, whole: Documents, first: int, last: int) -> None:
        self._whole, self._first = whole, first
        self._document = whole.holding(first)
        self._documents = whole.holding(last - 1) - self._document + 1
        self.fingerprint = _joined((whole.fingerprint, first, last))

    def __len__(self) -> int:
        return self._documents

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        found = self._whole.starts(first + self._document, min(last, len(self)) + self._document)
        return np.maximum(found - self._first, 0)

    def holding(self, token: int) -> int:
        return self._whole.holding(token + self._first) - self._document


class _JoinedDocuments:
    def __init__(self, parts: Sequence[Documents], starts: Sequence[int]) -> None:
        self._parts, self._starts = parts, starts
        numbers = list(accumulate((len(part) for part in parts), initial=0))
        self._documents, self._numbers = numbers.pop(), numbers
        self.fingerprint = _joined(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self._documents

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        found = [np.empty(0, np.int64)]
        for part, start, number in zip(self._parts, self._starts, self._numbers, strict=True):
            begin, end = max(first - number, 0), min(last - number, len(part))
            if begin < end:
                found.append(part.starts(begin, end) + start)
        return np.concatenate(found)

    def holding(self, token: int) -> int:
        k = bisect_right(self._starts, token) - 1
        return self._numbers[k] + self._parts[k].holding(token - self._starts[k])


def _joined(fingerprints: Any) -> str:
    return hashlib.sha256(repr(tuple(fingerprints)).encode()).hexdigest()


def find_token_files(path: str, endings: Sequence[str]) -> list[Path]:
    """The file at ``path``, those of a folder, or what a glob matches, that end in one of ``endings``; sorted by name.

    ConfigError that says what is there instead.
    """
    given = local_path(path, KEY)
    if given.is_dir():
        found = [p for p in given.rglob("*") if not any(n.startswith(".") for n in p.relative_to(given).parts)]
    else:
        found = [given] if given.exists() else [Path(name) for name in glob.glob(str(given), recursive=True)]
    files = sorted(p for p in found if p.is_file())
    wanted = [p for p in files if p.suffix in endings]
    if wanted:
        return wanted
    if not files:
        raise ConfigError(KEY, f"no file, folder or glob matches {path} (working directory {os.getcwd()})")
    kind = kind_of(_head(files[0]))
    what = "" if kind is None else f", {kind[0]}"
    raise ConfigError(
        KEY,
        f"{path} has no file that ends in {' or '.join(endings)} (there is {files[0].name}{what}); name the "
        "training.dataset that reads it, or make tokens of it with python -m torchtitan.data prepare",
    )


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1024)
    except OSError as error:
        raise cannot_read(error) from None


@contextlib.contextmanager
def mapping(files: int) -> Iterator[None]:
    """Within, ``files`` of them are mapped, each of which holds a descriptor; what cannot be read is a ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_DESCRIPTORS + _MAPS_OF_A_FILE * files
    if resource.RLIM_INFINITY != soft < needed:
        possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, possible), hard))
    try:
        yield
    except OSError as error:
        remedy = ""
        if error.errno == errno.EMFILE:
            remedy = f"; this system lets a process open {hard:,} (ulimit -Hn), and {needed:,} are needed: join some"
        raise ConfigError(KEY, f"cannot read {error.filename or 'token files'}: {error.strerror}{remedy}") from None
