"""Rows that are looked at and not trained on: a finite table that predicts every token once, and rounds over several.

Whose loss is taken on them, and when, is in evaluate.py; rows to train on are in the modules of their kinds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.files import KEY
from torchtitan.data.rows.rows import Rows, SourceRows, fingerprint_of, restart_at
from torchtitan.data.tokens.store import Documents, Tokens
from torchtitan.errors import ConfigError

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FiniteRows(Rows, Protocol):
    """Rows that end."""

    def __len__(self) -> int: ...


class WindowsOnce:
    """All tokens in their order, in windows of ``seq_len`` of which each begins with the last label of the one before.

    So every token but the first is the label of exactly one place. With ``documents`` positions restart where one
    begins, and its first token is no label. The last window is filled up with token 0 and labels that count in no loss.
    ConfigError where there is no second token to predict.
    """

    def __init__(self, tokens: Tokens, documents: Documents | None = None, *, seq_len: int) -> None:
        if len(tokens) < 2:
            raise ConfigError(KEY, "the data set holds a single token, so there is none to predict")
        self.seq_len = seq_len
        known = None if documents is None else documents.fingerprint
        self.fingerprint = fingerprint_of("once", tokens.fingerprint, known, seq_len)
        self._tokens, self._documents = tokens, documents
        self._positions = torch.arange(seq_len)

    def __len__(self) -> int:
        return math.ceil((len(self._tokens) - 1) / self.seq_len)

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"there are {len(self)} rows, and no row {row}")
        start, seq_len = row * self.seq_len, self.seq_len
        held = min(seq_len, len(self._tokens) - 1 - start)
        window = self._tokens.window(start, held + 1)
        tokens, labels, positions = np.zeros(seq_len, np.int64), np.full(seq_len, IGNORE_INDEX), self._positions
        tokens[:held], labels[:held] = window[:-1], window[1:]
        if self._documents is not None:
            holding = self._documents.holding
            begins = self._documents.starts(holding(start) + 1, holding(start + held) + 1) - start
            labels[begins - 1] = IGNORE_INDEX
            # What fills up is a document of its own.
            positions = torch.from_numpy(restart_at(np.append(begins, held), seq_len))
        return torch.from_numpy(tokens), torch.from_numpy(labels), positions


class OneEpoch:
    """The first epoch of ``rows``."""

    def __init__(self, rows: SourceRows) -> None:
        self.seq_len, self.fingerprint = rows.seq_len, fingerprint_of("one epoch", rows.fingerprint)
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.rows_per_epoch

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"there are {len(self)} rows, and no row {row}")
        return self._rows[row]


class Rounds:
    """The first rows of each of several tables, one table after the other, and all of it again and again.

    A round is ``batches[0]`` batches of ``batch_size`` rows that hold the first ``counts[0]`` rows of the first table,
    then the batches of the second, and so on: each table begins a batch of its own, and what a batch lacks is filled up
    with rows that count in no loss. So any row of any round is known by its number alone, and whoever takes whole
    rounds begins each of them at the same row.
    """

    def __init__(self, tables: Sequence[FiniteRows], counts: Sequence[int], *, batch_size: int) -> None:
        self.seq_len = tables[0].seq_len
        self.batches = [math.ceil(count / batch_size) for count in counts]
        self.fingerprint = fingerprint_of("rounds", [t.fingerprint for t in tables], list(counts), batch_size)
        self._tables, self._counts = list(tables), list(counts)
        self._starts = [batch_size * sum(self.batches[:table]) for table in range(len(tables) + 1)]
        self._filler = (
            torch.zeros(self.seq_len, dtype=torch.int64),
            torch.full((self.seq_len,), IGNORE_INDEX),
            torch.arange(self.seq_len),
        )

    def __getitem__(self, row: int) -> Row:
        place = row % self._starts[-1]
        table = bisect.bisect(self._starts, place) - 1
        place -= self._starts[table]
        return self._tables[table][place] if place < self._counts[table] else self._filler
