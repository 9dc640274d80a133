"""What a process holds of a tensor, for optimizers that compute on that alone, and its default: all.

How tensors are spread over ranks is in ``distributed/parts.py``; such optimizers are in files of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


class Parts:
    """Of a process that holds every tensor whole."""

    def local(self, tensor: Tensor) -> Tensor:
        """What this process holds of ``tensor``, in the same memory."""
        return tensor

    def zeros(self, parameter: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """As many rows as ``parameter`` has and ``columns`` in each, where and in the parts in which that lies."""
        return parameter.new_zeros((*parameter.shape[:-1], columns), dtype=dtype)


class LocalOptimizer(Optimizer):
    """Base of such optimizers. A run puts there what knows how its parameters are spread."""

    parts: Parts = Parts()
