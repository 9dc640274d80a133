"""Tokens as rows are cut from them: one long line of ids, which knows where its documents begin.

How a file format is read is in the module of its name, how text becomes tokens in cache.py.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Documents(Protocol):
    """Where documents begin, counted in tokens. Documents without tokens count as well."""

    @property
    def fingerprint(self) -> str:
        """Equal only where the same documents begin at the same tokens."""
        ...

    def __len__(self) -> int: ...

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """At which token each of the documents ``first`` <= d < ``last`` begins, ``[last - first]``, ascending."""
        ...

    def holding(self, token: int) -> int:
        """Number of the document that token 0 <= ``token`` < len(tokens) belongs to."""
        ...


class Tokens(Protocol):
    """The ids of all documents, one document after the other. Pickles as its paths, so that it travels to workers."""

    @property
    def fingerprint(self) -> str:
        """Equal only where the same ids stand in the same order, whatever their documents."""
        ...

    @property
    def documents(self) -> Documents | None:
        """None where nothing says where documents begin."""
        ...

    def __len__(self) -> int:
        """How many tokens there are, at least one."""
        ...

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """``length`` ids from ``start`` on, ``[length]``, of a circle: after the last token comes the first."""
        ...


class TokenWriter(Protocol):
    """Writes tokens in a format of files."""

    tokens: int
    documents: int

    def add(self, ids: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """More ids, and after how many of them documents end, ascending."""
        ...

    def finish(self) -> None:
        """Put all in its place."""
        ...

    def discard(self) -> None:
        """Leave nothing of it."""
        ...


def map_array(path: Path, dtype: str | np.dtype[Any], *, offset: int = 0, count: int = -1) -> npt.NDArray[Any]:
    """``count`` numbers from byte ``offset`` of a file on (-1: all), mapped into memory, not to be written to.

    A plain array, for slices of np.memmap cost several times as much.
    """
    if path.stat().st_size == 0:
        return np.empty(0, dtype)  # nothing cannot be mapped
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, dtype, count, offset)


def circle_slice(ids: npt.NDArray[Any], start: int, length: int) -> npt.NDArray[Any]:
    """``length`` of ``ids`` from ``start`` on, as they are stored; after the last one comes the first."""
    start %= len(ids)
    if start + length <= len(ids):
        return ids[start : start + length]
    return ids[np.arange(start, start + length) % len(ids)]


def circle_window(ids: npt.NDArray[Any], start: int, length: int) -> npt.NDArray[np.int64]:
    """What ``Tokens.window`` gives, of ``ids`` in one array."""
    return circle_slice(ids, start, length).astype(np.int64)
