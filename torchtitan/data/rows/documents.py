"""Windows over documents of which none sees another: the rows of ``data.packing = "documents"``.

Which window a row is, is in concat.py; masks are made from the positions, where attention is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.rows.rows import fingerprint_of, restart_at
from torchtitan.data.tokens.store import Documents, Tokens


class DocumentRows:
    """The windows of ``ConcatRows``, in its order, in which positions restart where a document begins, and the first
    token of a document is no label. A window that begins within a document counts from there."""

    def __init__(self, tokens: Tokens, documents: Documents, *, seq_len: int, shuffle: bool, seed: int) -> None:
        self._windows = ConcatRows(tokens, seq_len=seq_len, shuffle=shuffle, seed=seed)
        self.seq_len, self.rows_per_epoch = seq_len, self._windows.rows_per_epoch
        self.fingerprint = fingerprint_of("documents", self._windows.fingerprint, documents.fingerprint)
        self._tokens, self._documents = tokens, documents

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = self.seq_len + 1
        start = self._windows.window_of(row) * width % len(self._tokens)
        window = self._tokens.window(start, width)
        begins = self._begins(start, width)
        labels = window[1:].copy()
        labels[begins - 1] = IGNORE_INDEX
        positions = restart_at(begins, self.seq_len)
        return torch.from_numpy(window[:-1]), torch.from_numpy(labels), torch.from_numpy(positions)

    def _begins(self, start: int, width: int) -> npt.NDArray[np.int64]:
        """Where in the ``width`` tokens from ``start`` on documents begin, the first token apart; ascending."""
        found: list[npt.NDArray[np.int64]] = []
        for begin in range(0, start + width, len(self._tokens)):  # once or twice, unless the data is short
            last = min(start + width - begin, len(self._tokens)) - 1
            first = start if begin == 0 else 0
            inner = self._documents.starts(self._documents.holding(first) + 1, self._documents.holding(last) + 1)
            found += [np.array([begin - start]), inner + (begin - start)] if begin else [inner - start]
        return np.concatenate(found)
