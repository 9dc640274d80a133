"""The samples of Nanotron's Nanoset in their order: ``data.order = "source"``.

The files are read in ``tokens/datatrove.py``; which rows a rank takes is in ``loader.py``.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.rows.greedy import greedy_blend, normalized
from torchtitan.data.rows.rows import shifted
from torchtitan.data.rows.tables import Tables, open_tables
from torchtitan.data.tokens.store import Tokens
from torchtitan.errors import ConfigError

_SEED_OF_FILES = 42  # datatrove's own, whatever seed the order has


class FolderWindows:
    """The windows of a folder: files in datatrove's shuffled order, each cut into ``width`` tokens that do not overlap;
    what is left of a file is dropped."""

    def __init__(self, files: Sequence[Tokens], width: int) -> None:
        order = np.random.default_rng(seed=_SEED_OF_FILES).permutation(len(files)).tolist()
        self._files, self._width = [files[k] for k in order], width
        self._ends = list(accumulate(len(file) // width for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, window: int) -> npt.NDArray[np.int64]:
        k = bisect_right(self._ends, window)
        within = window - (self._ends[k - 1] if k else 0)
        return self._files[k].window(within * self._width, self._width)


def nanoset_order(lengths: Sequence[int], weights: Sequence[float] | None, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Folder and window in it of each sample of an epoch, ``[sum(lengths)]``; without ``weights`` by length.

    An epoch has as many samples as there are windows: by weight, small folders repeat in it, large ones do not end.
    """
    chosen, before = greedy_blend(normalized(weights or lengths), sum(lengths))
    windows = before % np.array(lengths)[chosen]
    for table in (chosen, windows):
        np.random.RandomState(seed).shuffle(table)
    return {"chosen": chosen, "windows": windows}


class NanosetRows:
    """Row k is sample k of a Nanoset; every epoch has the same order. All labels count in the loss."""

    def __init__(
        self,
        folders: Sequence[Sequence[Tokens]],
        weights: Sequence[float] | None,
        *,
        seq_len: int,
        seed: int,
        cache_folder: str = "",
    ) -> None:
        self._made_of = (folders, weights, seq_len, seed, cache_folder)
        self.seq_len = seq_len
        self._folders = [FolderWindows(files, seq_len + 1) for files in folders]
        lengths = [len(folder) for folder in self._folders]
        if 0 in lengths:
            raise ConfigError(
                "training.seq_len", f"no file of a source holds the {seq_len + 1:,} tokens of a window; lower it"
            )
        shares = None if weights is None or len(folders) == 1 else tuple(weights)
        facts = (lengths, shares, seed)
        prints = [[file.fingerprint for file in files] for files in folders]
        self.fingerprint = hashlib.sha256(repr(("Nanoset", seq_len, facts, prints)).encode()).hexdigest()
        self.tables: Tables = open_tables(
            "Nanoset", facts, lambda: nanoset_order(lengths, shares, seed), cache_folder=cache_folder
        )
        self._chosen, self._windows = self.tables["chosen"], self.tables["windows"]
        self._positions = torch.arange(seq_len)

    def __reduce__(self) -> Any:
        return _again, self._made_of

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if row < 0:
            raise IndexError(f"rows are counted from 0, not {row}")
        sample = row % len(self._chosen)
        window = self._folders[int(self._chosen[sample])][int(self._windows[sample])]
        return *shifted(window), self._positions


def _again(folders: Any, weights: Any, seq_len: int, seed: int, cache_folder: str) -> NanosetRows:
    return NanosetRows(folders, weights, seq_len=seq_len, seed=seed, cache_folder=cache_folder)
