"""A blend of several sources: which of them gives a row, and which of its own rows that is.

What the rows of one source are does not belong here. Everything is a function of the row's number, worked out in as
many steps as the logarithm of the number of sources, so a run may begin anywhere.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from torchtitan.data.rows.rows import SourceRows, fingerprint_of


class Split:
    """Deals the numbers 0, 1, 2, … out to names by their ``weights``, which need not sum to 1.

    Of the first n each name gets within two of n times its share, exactly, for every n: the names are the leaves of a
    Huffman tree of their weights, and each node of it gives the n-th of its numbers to the left side where the rounded
    share of that side grows by it.
    """

    def __init__(self, weights: Mapping[str, Fraction]) -> None:
        if not weights or not all(weight > 0 for weight in weights.values()):
            raise ValueError(f"weights must be positive: {dict(weights)}")
        # Ties are broken by the order in which names come, so that the tree is a function of the weights.
        order = itertools.count()
        heap: list[tuple[Fraction, int, _Node | str]] = [(w, next(order), name) for name, w in weights.items()]
        heapq.heapify(heap)
        while len(heap) > 1:
            (right_weight, _, right), (left_weight, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            whole = left_weight + right_weight
            heapq.heappush(heap, (whole, next(order), _Node(left_weight / whole, left, right)))
        self._root = heap[0][2]

    def place(self, number: int) -> tuple[str, int]:
        """Who gets ``number``, and how many of those before it the same one got."""
        node = self._root
        while isinstance(node, _Node):
            left = node.left_of(number)
            goes_left = node.left_of(number + 1) > left
            node, number = (node.left, left) if goes_left else (node.right, number - left)
        return node, number

    def counts(self, numbers: int) -> dict[str, int]:
        """How many of the first ``numbers`` each name gets."""
        counts: dict[str, int] = {}
        waiting = [(self._root, numbers)]
        while waiting:
            node, n = waiting.pop()
            if isinstance(node, _Node):
                left = node.left_of(n)
                waiting += [(node.left, left), (node.right, n - left)]
            else:
                counts[node] = n
        return counts


@dataclass(frozen=True)
class _Node:
    share: Fraction
    left: _Node | str
    right: _Node | str

    def left_of(self, n: int) -> int:
        """How many of the first ``n`` go left: their share, rounded to the nearest (halves up)."""
        top, bottom = self.share.numerator, self.share.denominator
        return (2 * n * top + bottom) // (2 * bottom)


def split_fingerprint(weights: Mapping[str, Fraction], rows: Mapping[str, SourceRows]) -> str:
    """Equal only where ``weights`` blend the same rows of the same sources alike; a source alone is itself."""
    if len(weights) == 1:
        (name,) = weights
        return rows[name].fingerprint
    total = sum(weights.values())
    facts = [(name, str(weight / total), rows[name].fingerprint) for name, weight in weights.items()]
    return fingerprint_of("mixture", facts)


class Mixture:
    """Rows of the sources ``rows``, in ``stages``: each begins with a row and blends some of them by weights.

    The first stage begins with row 0. A source that several stages name goes on where it stood.
    """

    def __init__(self, rows: Mapping[str, SourceRows], stages: Sequence[tuple[int, Mapping[str, Fraction]]]) -> None:
        self.seq_len = next(iter(rows.values())).seq_len
        self._rows = rows
        self._begins = [begin for begin, _ in stages]
        self._splits = [Split(weights) for _, weights in stages]
        if self._begins[0] != 0 or sorted(self._begins) != self._begins:
            raise ValueError(f"stages begin with the rows {self._begins}")
        self._before: list[dict[str, int]] = [dict.fromkeys(rows, 0)]
        for split, (begin, end) in zip(self._splits, itertools.pairwise(self._begins), strict=False):
            self._before.append(_sums(self._before[-1], split.counts(end - begin)))
        facts = [(begin, split_fingerprint(weights, rows)) for begin, weights in stages]
        self.fingerprint = fingerprint_of(*facts)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        name, own = self.place(row)
        return self._rows[name][own]

    def place(self, row: int) -> tuple[str, int]:
        """The source that gives row ``row``, and the number of that row within the source."""
        if row < 0:
            raise IndexError(f"rows are counted from 0, not {row}")
        stage = bisect.bisect_right(self._begins, row) - 1
        name, number = self._splits[stage].place(row - self._begins[stage])
        return name, self._before[stage][name] + number

    def counts(self, rows: int) -> dict[str, int]:
        """How many of the first ``rows`` rows each source gives."""
        stage = max(bisect.bisect_left(self._begins, rows) - 1, 0)
        return _sums(self._before[stage], self._splits[stage].counts(rows - self._begins[stage]))


def _sums(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: count + more.get(name, 0) for name, count in counts.items()}
