"""The samples of Nanotron's Nanoset in their order: ``data.order = "source"``.

The files are read in ``tokens/datatrove.py``; which rows a rank takes is in ``loader.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.rows.greedy import greedy_blend, normalized
from torchtitan.data.rows.rows import fingerprint_of, shifted
from torchtitan.data.tokens.store import Tokens
from torchtitan.errors import ConfigError

_SEED_OF_FILES = 42  # datatrove's own, whatever seed the order has


class FolderRows:
    """Row k is window k of a folder: files in datatrove's shuffled order, each cut into ``seq_len`` + 1 tokens that do
    not overlap; what is left of a file is dropped. All labels count in the loss. ``seed`` is that of the order in which
    they are going to be taken, which ``fingerprint`` tells as well."""

    def __init__(self, files: Sequence[Tokens], *, seq_len: int, seed: int) -> None:
        order = np.random.default_rng(seed=_SEED_OF_FILES).permutation(len(files)).tolist()
        self.seq_len, self._files = seq_len, [files[k] for k in order]
        self._ends = list(accumulate(len(file) // (seq_len + 1) for file in self._files))
        self.rows_per_epoch = self._ends[-1]
        if self.rows_per_epoch == 0:
            raise ConfigError("training.seq_len", f"no file holds the {seq_len + 1:,} tokens of a window; lower it")
        self.fingerprint = fingerprint_of("Nanoset", seq_len, seed, [file.fingerprint for file in files])
        self._positions = torch.arange(seq_len)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        window = row % self.rows_per_epoch
        k = bisect_right(self._ends, window)
        within = window - (self._ends[k - 1] if k else 0)
        width = self.seq_len + 1
        return *shifted(self._files[k].window(within * width, width)), self._positions


def nanoset_tables(lengths: Sequence[int], weights: Sequence[float], seed: int) -> dict[str, npt.NDArray[Any]]:
    """Which folder gives each sample of an epoch, and which of its windows that is, ``[sum(lengths)]`` each.

    An epoch has as many samples as there are windows: by weight, small folders repeat in it, large ones do not end. All
    epochs have the same order.
    """
    chosen, before = greedy_blend(normalized(weights), sum(lengths))
    own = before % np.array(lengths)[chosen]
    for table in (chosen, own):
        np.random.RandomState(seed).shuffle(table)
    return {"chosen": chosen, "own": own}
