"""Documents one after the other, cut into windows: the rows of ``data.packing = "concat"``.

How text became tokens (tokens/) does not belong here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.rows.rows import fingerprint_of, place_of, shifted
from torchtitan.data.tokens.store import Tokens


class ConcatRows:
    """Documents one after the other, cut into windows of ``seq_len`` + 1 tokens that do not overlap.

    The first ``seq_len`` tokens of a window are its input and the last ``seq_len`` its labels. The data is a
    circle: a window may run over its end, so nothing is dropped and every epoch cuts elsewhere. An epoch has
    as many windows as fit into the data once; shuffled, it takes them in an order of its own.
    """

    def __init__(self, tokens: Tokens, *, seq_len: int, shuffle: bool, seed: int) -> None:
        self.seq_len = seq_len
        self.rows_per_epoch = max(1, len(tokens) // (seq_len + 1))
        self.fingerprint = fingerprint_of("concat", tokens.fingerprint, seq_len, shuffle, seed if shuffle else None)
        self.tokens, self._shuffle, self._seed = tokens, shuffle, seed
        self._positions = torch.arange(seq_len)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *shifted(self.cut(row)[1]), self._positions

    def cut(self, row: int) -> tuple[int, npt.NDArray[np.int64]]:
        width = self.seq_len + 1
        start = self.window_of(row) * width
        return start, self.tokens.window(start, width)

    @property
    def circle(self) -> int:
        return len(self.tokens)

    def window_of(self, row: int) -> int:
        """Which window, counted along the endless circle, is row ``row``."""
        epoch, place = place_of(row, self.rows_per_epoch, shuffle=self._shuffle, seed=self._seed)
        return epoch * self.rows_per_epoch + place
