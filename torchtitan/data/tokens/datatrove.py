"""Token files as datatrove writes them and Nanotron's Nanoset reads them: ``X.ds``, ``X.ds.index``, ``X.ds.metadata``.

``X.ds`` has the ids one after the other, ``X.ds.index`` as uint64 the end of each document in tokens, both
little-endian without a header. ``X.ds.metadata`` has three lines: tokenizer|bytes of an id, number of tokens, and that
number for people. What becomes of the tokens does not belong here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def index_path(ds: Path) -> Path:
    return ds.with_name(ds.name + ".index")


def metadata_path(ds: Path) -> Path:
    return ds.with_name(ds.name + ".metadata")


def id_dtype(vocab_size: int) -> str:
    """The type in which ids below ``vocab_size`` are stored."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class EndedDocuments:
    """Documents by their ends, ascending; the first begins at 0."""

    def __init__(self, ends: npt.NDArray[Any], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        if first > 0 or last <= first:
            return self._ends[max(first, 1) - 1 : last - 1].astype(np.int64)
        return np.concatenate([np.zeros(1, np.int64), self._ends[: last - 1].astype(np.int64)])

    def holding(self, token: int) -> int:
        return int(np.searchsorted(self._ends, np.uint64(token), side="right"))


def metadata_text(tokenizer: str, id_bytes: int, tokens: int) -> str:
    """What ``X.ds.metadata`` holds: no newline at its end."""
    return f"{tokenizer}|{id_bytes}\n{tokens}\n{_for_people(tokens)}"


def _for_people(tokens: int) -> str:
    """Three digits and a prefix, as humanize.metric writes them, with T for token."""
    exponent = len(str(tokens)) - 1
    thousands, digits = divmod(exponent, 3)
    return f"{tokens / 1000**thousands:.{2 - digits}f} {' kMGTPE'[thousands].strip()}T"
