"""Training rows as pure functions of their global index: which tokens make row i, in which order.

Which rows a rank takes at a step (loader.py) and how text became tokens (tokens.py) do not belong here.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Protocol

import torch

from torchtitan.data.tokens import TokenFile

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Rows(Protocol):
    """An endless table of training rows."""

    seq_len: int
    fingerprint: str
    """Equal only where every row is; for who resumes, to tell that the data is still the same."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, labels and positions of row ``row`` >= 0, each int64 ``[seq]``; not to be written to."""
        ...


class ConcatRows:
    """Documents one after the other, cut into windows of ``seq_len`` + 1 tokens that do not overlap.

    The first ``seq_len`` tokens of a window are its input and the last ``seq_len`` its labels. The data is a
    circle: a window may run over its end, so nothing is dropped and every epoch cuts elsewhere. An epoch has
    as many windows as fit into the data once; shuffled, it takes them in an order of its own.
    """

    def __init__(self, tokens: TokenFile, *, seq_len: int, shuffle: bool, seed: int) -> None:
        self.seq_len = seq_len
        self.windows_per_epoch = max(1, len(tokens) // (seq_len + 1))
        facts = ("concat", tokens.fingerprint, seq_len, shuffle, seed if shuffle else None)
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
        self._tokens, self._shuffle, self._seed = tokens, shuffle, seed
        self._positions = torch.arange(seq_len)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = self.seq_len + 1
        window = self._tokens.window(self.window_of(row) * width, width)
        # Sliced by numpy, which takes a tenth of torch's time.
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:]), self._positions

    def window_of(self, row: int) -> int:
        """Which window, counted along the endless circle, is row ``row``."""
        if row < 0:
            raise IndexError(f"rows are counted from 0, not {row}")
        if not self._shuffle:
            return row
        epoch, place = divmod(row, self.windows_per_epoch)
        return epoch * self.windows_per_epoch + permute(place, self.windows_per_epoch, round_keys(self._seed, epoch))


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
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(index, side)
        for key in keys:
            mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & _MASK
            mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK
            left, right = right, (left + (mixed >> 32)) % side
        index = left * side + right
        if index < size:
            return index
