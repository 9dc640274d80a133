"""Tokens of documents of given lengths in which each id is its own place, so that a test sees where a token was."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtitan.data.tokens.datatrove import EndedDocuments
from torchtitan.data.tokens.store import Documents


class Line:
    """Ids 0, 1, 2, … of documents that have ``lengths`` tokens."""

    def __init__(self, lengths: Sequence[int] | npt.NDArray[np.int64], *, indexed: bool = True) -> None:
        ends = np.cumsum(np.asarray(lengths, np.int64)).astype("<u8")
        self.size, self.fingerprint = int(ends[-1]), f"{int(ends[-1])} tokens"
        self.documents: Documents | None = EndedDocuments(ends, str(hash(ends.tobytes()))) if indexed else None

    def __len__(self) -> int:
        return self.size

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        return np.arange(start, start + length, dtype=np.int64) % self.size
