"""Rows of a stream: windows as ``concat.py`` cuts them, shuffled in blocks, for nobody knows how many will come.

How a stream becomes tokens (tokens/stream.py) does not belong here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.rows.rows import fingerprint_of, place_of, shifted
from torchtitan.data.tokens.stream import StreamTokens
from torchtitan.errors import ConfigError

_UNSHUFFLED = 16


class StreamRows:
    """Documents one after the other, cut into windows of ``seq_len`` + 1 tokens that do not overlap.

    Shuffled, each ``tokens.shuffle_rows`` windows in a row change places among themselves, each block in an order of
    its own. Where the stream ends it begins anew, and a window may run over its end.
    """

    def __init__(self, tokens: StreamTokens, *, seq_len: int, shuffle: bool, seed: int) -> None:
        self.seq_len = seq_len
        self._block = tokens.shuffle_rows if shuffle else _UNSHUFFLED
        self.fingerprint = fingerprint_of("stream", tokens.fingerprint, seq_len, shuffle and (self._block, seed))
        self.tokens, self._shuffle, self._seed = tokens, shuffle, seed
        self._positions = torch.arange(seq_len)

    @property
    def rows_per_epoch(self) -> int:
        """ConfigError where the stream has not ended yet."""
        if not self.tokens.ended:
            raise ConfigError(
                "data.max_epochs",
                "nobody knows how many rows a stream has before its end; leave this out, or set "
                "data.args.streaming = false",
            )
        return max(1, len(self.tokens) // (self.seq_len + 1))

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *shifted(self.cut(row)[1]), self._positions

    def cut(self, row: int) -> tuple[int, npt.NDArray[np.int64]]:
        width = self.seq_len + 1
        # The block after the one that is read is made meanwhile, or each would begin with waiting.
        self.tokens.want((row + 2 * self._block) * width)
        start = self.window_of(row) * width
        return start, self.tokens.window(start, width)

    @property
    def circle(self) -> int:
        return self.tokens.progress.tokens

    def window_of(self, row: int) -> int:
        """Which window, counted along the endless circle, is row ``row``."""
        block, place = place_of(row, self._block, shuffle=self._shuffle, seed=self._seed)
        return block * self._block + place
