"""Windows over documents of which none sees another: the rows of ``data.packing = "documents"``.

Which window a row is, is in concat.py; masks are made from the positions, where attention is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.rows.rows import Windows, fingerprint_of, restart_at
from torchtitan.data.tokens.store import Documents


class DocumentRows:
    """The rows of ``windows``, in which positions restart where a document begins, and the first token of a document is
    no label. A window that begins within a document counts from there."""

    def __init__(self, windows: Windows, documents: Documents) -> None:
        self._windows, self.seq_len = windows, windows.seq_len
        self.fingerprint = fingerprint_of("documents", windows.fingerprint, documents.fingerprint)

    @property
    def rows_per_epoch(self) -> int:
        return self._windows.rows_per_epoch

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start, window = self._windows.cut(row)
        begins = self._begins(start % self._windows.circle, len(window))
        labels = window[1:].copy()
        labels[begins - 1] = IGNORE_INDEX
        positions = restart_at(begins, self.seq_len)
        return torch.from_numpy(window[:-1]), torch.from_numpy(labels), torch.from_numpy(positions)

    def _begins(self, start: int, width: int) -> npt.NDArray[np.int64]:
        """Where in the ``width`` tokens from ``start`` on documents begin, the first token apart; ascending."""
        documents, circle = self._windows.tokens.documents, self._windows.circle
        assert documents is not None
        found: list[npt.NDArray[np.int64]] = []
        for begin in range(0, start + width, circle):  # once or twice, unless the data is short
            last = min(start + width - begin, circle) - 1
            first = start if begin == 0 else 0
            inner = documents.starts(documents.holding(first) + 1, documents.holding(last) + 1)
            found += [np.array([begin - start]), inner + (begin - start)] if begin else [inner - start]
        return np.concatenate(found)
