"""Rows of a stream: windows as ``concat.py`` cuts them, shuffled in blocks, for nobody knows how many will come.

How a stream becomes tokens (tokens/stream.py) does not belong here.
"""

from __future__ import annotations

import hashlib

import torch

from torchtitan.data.rows.rows import permute, round_keys
from torchtitan.data.tokens.stream import StreamTokens

_AHEAD = 16


class StreamRows:
    """Documents one after the other, cut into windows of ``seq_len`` + 1 tokens that do not overlap.

    Shuffled, each ``tokens.shuffle_rows`` windows in a row change places among themselves, each block in an order of
    its own. Where the stream ends it begins anew, and a window may run over its end.
    """

    def __init__(self, tokens: StreamTokens, *, seq_len: int, shuffle: bool, seed: int) -> None:
        self.seq_len = seq_len
        self._block = tokens.shuffle_rows if shuffle else 0
        facts = ("stream", tokens.fingerprint, seq_len, self._block, seed if shuffle else None)
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
        self._tokens, self._seed = tokens, seed
        self._positions = torch.arange(seq_len)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = self.seq_len + 1
        # The block after the one that is read is made meanwhile, or each would begin with waiting.
        self._tokens.want((row + 2 * max(self._block, _AHEAD)) * width)
        window = self._tokens.window(self.window_of(row) * width, width)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:]), self._positions

    def window_of(self, row: int) -> int:
        """Which window, counted along the endless circle, is row ``row``."""
        if row < 0:
            raise IndexError(f"rows are counted from 0, not {row}")
        if not self._block:
            return row
        block, place = divmod(row, self._block)
        return block * self._block + permute(place, self._block, round_keys(self._seed, block))
