"""Which parameters have states that are kept in blocks of numbers along their last dimension.

How a block is kept is in ``low_bit.py``, which ranks could cut one in ``distributed/spread.py``.
"""

import math
from collections.abc import Sequence

_SMALL = 4096
"""Numbers; those of smaller parameters are little memory (Dettmers et al. 2022, section 2)."""


def kept_in_blocks(shape: Sequence[int], block_size: int) -> bool:
    """Whether states of a parameter of this ``shape`` are, in whatever layout: a block ends where a row does."""
    return math.prod(shape) >= _SMALL and shape[-1] % block_size == 0
