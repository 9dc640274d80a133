"""Which of several data sets gives each sample, by the greedy rule that Megatron-LM and Nanoset share.

Our own mixtures do not belong here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def greedy_blend(shares: Sequence[float], samples: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Number of the data set, and how many samples it has given before, of each of ``samples``.

    Each is taken from the set that is furthest behind its share, the first of equals. ``shares`` are taken as they are:
    where they tie, the last bit of a quotient decides.
    """
    counts = [0] * len(shares)
    chosen, before = array("h"), array("q")
    for sample in range(samples):
        due = float(max(sample, 1))
        behind = [share * due - count for share, count in zip(shares, counts, strict=True)]
        k = behind.index(max(behind))
        chosen.append(k)
        before.append(counts[k])
        counts[k] += 1
    return np.frombuffer(chosen, np.int16), np.frombuffer(before, np.int64)


def normalized(weights: Sequence[float]) -> list[float]:
    """Shares of one, each a quotient as those programs have it."""
    return [weight / sum(weights) for weight in weights]
