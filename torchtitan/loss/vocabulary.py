"""What a loss is told where the logits it gets are those of a part of the vocabulary.

Which ranks have the other parts, and how they are reached, is in ``distributed/tensor.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of losses
    from torch import Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """The part of a vocabulary that a rank's logits are of: the ids from ``first`` on, of ``size`` in all.

    ``sum`` and ``max`` combine a tensor elementwise with those of the ranks that have the other parts. Where all of
    them compute the same loss from a sum, as they must, gradients pass ``sum`` unchanged; none pass ``max``.
    """

    first: int
    size: int
    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]
