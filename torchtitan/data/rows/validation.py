"""Rows that are looked at and not trained on: a finite table that predicts every token once, and rounds over several.

Whose loss is taken on them, and when, is in evaluate.py; rows to train on are in the modules of their kinds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.files import KEY
from torchtitan.data.rows.rows import Rows, SourceRows, ToldRows, fingerprint_of, restart_at
from torchtitan.data.tokens.store import Tokens
from torchtitan.data.tokens.stream import StreamTokens
from torchtitan.errors import ConfigError

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FiniteRows(Rows, Protocol):
    """Rows that end."""

    def __len__(self) -> int: ...


RowsOnce = Callable[[int | None], FiniteRows]
"""Gives the first so many rows, or as many as there are; None: all of them."""


class ToldTable(ToldRows):
    """The same of rows that end."""

    _rows: FiniteRows

    def __len__(self) -> int:
        return len(self._rows)


class WindowsOnce:
    """All tokens in their order, in windows of ``seq_len`` of which each begins with the last label of the one before;
    or the first ``most`` of these windows, and of a stream no more is read than they take.

    So every token but the first is the label of exactly one place. With documents kept ``apart`` positions restart
    where one begins, and its first token is no label. The last window is filled up with token 0 and labels that count
    in no loss. ConfigError where there is no second token to predict.
    """

    def __init__(self, tokens: Tokens, most: int | None = None, *, apart: bool = False, seq_len: int) -> None:
        wanted = None if most is None else most * seq_len + 1
        held = tokens.wait_for(wanted) if isinstance(tokens, StreamTokens) else len(tokens)
        held = held if wanted is None else min(held, wanted)
        if held < 2:
            raise ConfigError(KEY, "the data set holds a single token, so there is none to predict")
        self.seq_len = seq_len
        known = tokens.documents.fingerprint if apart and tokens.documents is not None else None
        self.fingerprint = fingerprint_of("once", tokens.fingerprint, held, known, seq_len)
        self._tokens, self._held, self._apart = tokens, held, apart
        self._positions = torch.arange(seq_len)

    def __len__(self) -> int:
        return math.ceil((self._held - 1) / self.seq_len)

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"there are {len(self)} rows, and no row {row}")
        start, seq_len = row * self.seq_len, self.seq_len
        held = min(seq_len, self._held - 1 - start)
        window = self._tokens.window(start, held + 1)
        tokens, labels, positions = np.zeros(seq_len, np.int64), np.full(seq_len, IGNORE_INDEX), self._positions
        tokens[:held], labels[:held] = window[:-1], window[1:]
        documents = self._tokens.documents if self._apart else None
        if documents is not None:
            holding = documents.holding
            begins = documents.starts(holding(start) + 1, holding(start + held) + 1) - start
            labels[begins - 1] = IGNORE_INDEX
            # What fills up is a document of its own.
            positions = torch.from_numpy(restart_at(np.append(begins, held), seq_len))
        return torch.from_numpy(tokens), torch.from_numpy(labels), positions


class OneEpoch:
    """The first epoch of ``rows``, or the first ``most`` rows of it."""

    def __init__(self, rows: SourceRows, most: int | None = None) -> None:
        self._rows, self._held = rows, rows.rows_per_epoch if most is None else min(most, rows.rows_per_epoch)
        self.seq_len, self.fingerprint = rows.seq_len, fingerprint_of("one epoch", rows.fingerprint, self._held)

    def __len__(self) -> int:
        return self._held

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"there are {len(self)} rows, and no row {row}")
        return self._rows[row]


class Rounds:
    """Several tables, one after the other, and all of it again and again.

    A round is ``batches[0]`` batches of ``batch_size`` rows that hold the first table,
    then the batches of the second, and so on: each table begins a batch of its own, and what a batch lacks is filled up
    with rows that count in no loss. So any row of any round is known by its number alone, and whoever takes whole
    rounds begins each of them at the same row.
    """

    def __init__(self, tables: Sequence[FiniteRows], *, batch_size: int) -> None:
        self.seq_len = tables[0].seq_len
        self.batches = [math.ceil(len(table) / batch_size) for table in tables]
        self.fingerprint = fingerprint_of("rounds", [t.fingerprint for t in tables], batch_size)
        self._tables = list(tables)
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
        return self._tables[table][place] if place < len(self._tables[table]) else self._filler
