"""Rows: what a training row is, and the order in which an epoch takes them.

What makes up a row of a kind is in the module of that kind; which rows a rank takes at a step, in loader.py.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.tokens.store import Tokens
from torchtitan.errors import keys_told_as

_ROUNDS = 6
_NEIGHBOURS = 64
_U64 = np.uint64


class Rows(Protocol):
    """An endless table of training rows."""

    seq_len: int
    fingerprint: str
    """Equal only where every row is; for who resumes, to tell that the data is still the same."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, labels and positions of row ``row`` >= 0, each int64 ``[seq]``; not to be written to."""
        ...


class SourceRows(Rows, Protocol):
    """The rows of one source."""

    @property
    def rows_per_epoch(self) -> int:
        """After so many rows the data have been taken once, and an order of its own begins."""
        ...


class ToldRows:
    """``rows`` of one data set of several: what is wrong with one of them is told by the keys and the name of that set,
    as ``errors.keys_told_as`` does."""

    def __init__(self, rows: Rows, told_as: Mapping[str, str], name: str) -> None:
        self.seq_len, self.fingerprint = rows.seq_len, rows.fingerprint
        self._rows, self._told_as, self._name = rows, dict(told_as), name

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with keys_told_as(self._told_as, self._name):
            return self._rows[row]


class ToldSource(ToldRows):
    """The same of a source."""

    _rows: SourceRows

    @property
    def rows_per_epoch(self) -> int:
        with keys_told_as(self._told_as, self._name):
            return self._rows.rows_per_epoch


class Windows(SourceRows, Protocol):
    """Rows that are windows of ``seq_len`` + 1 tokens, cut without overlap from a circle of documents."""

    @property
    def tokens(self) -> Tokens: ...

    def cut(self, row: int) -> tuple[int, npt.NDArray[np.int64]]:
        """The token, counted along the endless circle, that the window of row ``row`` begins with, and the window."""
        ...

    @property
    def circle(self) -> int:
        """After how many tokens the first one comes again; of data still to come, how many are there: all of what was
        cut."""
        ...


class BlendedRows(Rows, Protocol):
    """The rows of a run, of any number of sources."""

    def place(self, row: int) -> tuple[str, int]:
        """The source that gives row ``row``, and the number of that row within the source."""
        ...

    def counts(self, rows: int) -> dict[str, int]:
        """How many of the first ``rows`` rows each source gives."""
        ...


def restart_at(begins: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """Positions ``[seq_len]`` that count from 0, and from 0 again at each of ``begins``, ascending and up to
    ``seq_len``."""
    edges = np.concatenate(([0], begins, [seq_len]))
    positions: npt.NDArray[np.int64] = np.arange(seq_len) - np.repeat(edges[:-1], np.diff(edges))
    return positions


def place_of(row: int, rows_per_epoch: int, *, shuffle: bool, seed: int) -> tuple[int, int]:
    """The epoch of row ``row`` and which of its ``rows_per_epoch`` it is; shuffled, each epoch has an order of its
    own."""
    if row < 0:
        raise IndexError(f"rows are counted from 0, not {row}")
    epoch, place = divmod(row, rows_per_epoch)
    return epoch, permute(place, rows_per_epoch, round_keys(seed, epoch)) if shuffle else place


def fingerprint_of(*facts: Any) -> str:
    """Equal where ``facts``, which print as what they are, are equal."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def shifted(window: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a window ``[seq + 1]``: all but its last and all but its first, without a copy."""
    seq = len(window) - 1
    # Two views of torch's take four times as long, and of numpy's that become torch's one and a half times.
    return (
        torch.frombuffer(window, dtype=torch.int64, count=seq),
        torch.frombuffer(window, dtype=torch.int64, count=seq, offset=8),
    )


@functools.lru_cache(maxsize=8)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Keys of the permutation of one epoch."""
    digest = hashlib.shake_128(f"epoch {epoch} of seed {seed}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where a pseudo-random permutation of ``range(size)`` sends ``index``: no table, so any size starts at once.

    A Feistel network on pairs (left, right) of numbers below the root of ``size``, walked on while it leads
    outside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    return _permuted(index // _NEIGHBOURS, size, keys)[index % _NEIGHBOURS]


@functools.lru_cache(maxsize=256)
def _permuted(block: int, size: int, keys: tuple[int, ...]) -> list[int]:
    """``permute`` of neighbours at once, for who asks for one asks for the next: a fifth of the time of one by one."""
    side, indices = _U64(math.isqrt(size - 1) + 1), np.arange(_NEIGHBOURS, dtype=_U64) + _U64(block * _NEIGHBOURS)
    walking = indices < size
    while walking.any():
        left, right = np.divmod(indices[walking], side)
        for key in keys:
            mixed = (right ^ _U64(key)) * _U64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> _U64(32))) * _U64(0xD6E8FEB86659FD93)
            left, right = right, (left + (mixed >> _U64(32))) % side
        indices[walking] = left * side + right
        walking[walking] = indices[walking] >= size
    return indices.tolist()
