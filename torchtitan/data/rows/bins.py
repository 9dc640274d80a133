"""Documents of which no row holds more than fits: cut into pieces, and pieces put into rows by best fit.

Arrays in, arrays out: no tokens, and where a plan is kept (best_fit.py) does not belong here.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def cut_documents(starts: Integers, ends: Integers, capacity: int) -> tuple[Integers, Integers]:
    """At which token each piece of the documents begins, ascending, and how many labels it has, 1 to ``capacity``.

    A document of n tokens has n - 1 labels, for nothing comes before its first token and its last comes before
    nothing: a piece of k labels takes k + 1 tokens, the last of which begins the next piece. Documents of less than
    two tokens have no piece.
    """
    labels = np.maximum(ends - starts - 1, 0)
    pieces = -(-labels // capacity)
    begins = np.repeat(starts, pieces)
    # How many pieces of the same document come before each.
    before = np.arange(len(begins)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    before *= capacity
    lengths = np.minimum(np.repeat(labels, pieces) - before, capacity)
    begins += before
    return begins, lengths


def best_fit(lengths: Integers, capacity: int) -> tuple[Integers, int]:
    """In which row each piece goes, and how many rows there are: the longest first, each into the fullest row that has
    room for it (best fit decreasing; Ding et al., Fewer Truncations Improve Language Modeling, 2024).

    Pieces of one length are placed together: of rows with equal room, the first takes as many as fit, then the next.
    So the work is in the number of lengths, not in that of pieces.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(lengths, kind="stable")
    rows_with: defaultdict[int, list[Integers]] = defaultdict(list)  # room → rows that have it
    has_rows = np.zeros(capacity + 1, bool)
    rows = 0

    def put_back(room: int, some: Integers) -> None:
        if room and len(some):
            rows_with[room].append(some)
            has_rows[room] = True

    for length, count in zip(*(x.tolist()[::-1] for x in np.unique(lengths, return_counts=True)), strict=True):
        by_length, waiting = by_length[:-count], by_length[-count:]
        while len(waiting):
            room = length + int(has_rows[length:].argmax())
            if has_rows[room]:
                some = rows_with[room].pop()
                has_rows[room] = bool(rows_with[room])
            else:
                room = capacity
                some = np.arange(rows, rows - (-len(waiting) // (capacity // length)))
                rows += len(some)
            each = room // length
            full, rest = divmod(min(len(waiting), each * len(some)), each)
            placed = waiting[: full * each + rest]
            row_of[placed] = np.repeat(some[: full + 1], each)[: len(placed)]
            put_back(room - each * length, some[:full])
            put_back(room - rest * length, some[full : full + 1])
            put_back(room, some[full + 1 :])
            waiting = waiting[len(placed) :]
    return row_of, rows


def by_rows(row_of: Integers, rows: int) -> tuple[Integers, Integers]:
    """The pieces row by row, those of a row and the rows by their first piece in the order of the documents; and where
    in that list each row begins and the last ends, ``[rows + 1]``."""
    first = np.empty(rows, np.int64)
    first[row_of[::-1]] = np.arange(len(row_of))[::-1]  # of equal ones the last is kept: that of the first piece
    rank = np.empty(rows, np.int64)
    rank[np.argsort(first)] = np.arange(rows)
    row_of = rank[row_of]
    order = np.argsort(row_of, kind="stable")
    edges = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=edges[1:])
    return order, edges
