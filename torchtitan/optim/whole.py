"""Optimizers that need whole matrices where a rank may hold a part: what they ask for, and its default.

How matrices are put together is in ``distributed/whole.py``; such optimizers are in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Task:
    """What is to be done for one ``parameter``, ``[rows, columns]``, spread over ranks or not.

    ``direction()`` gives a tensor that is spread like the parameter; ``compute`` makes of the whole of it another of
    the same shape, whose type is ``dtype``; ``update`` gets that, spread like the parameter again. Each is called once,
    ``compute`` on one of the ranks that hold the parameter. ``cost`` is its operations, as far as they compare.
    """

    parameter: Tensor
    direction: Callable[[], Tensor]
    compute: Callable[[Tensor], Tensor]
    update: Callable[[Tensor], None]
    dtype: torch.dtype
    cost: float


MapWhole = Callable[[Sequence[Task]], None]


def map_here(tasks: Sequence[Task]) -> None:
    """All tasks in turn, on a process that holds every parameter whole."""
    for task in tasks:
        task.update(task.compute(task.direction()))


class WholeMatrixOptimizer(Optimizer):
    """Base of such optimizers. Their ``step`` hands its tasks to ``map_whole``, all of a step at once; a run on several
    ranks puts there what shares them out."""

    map_whole: MapWhole = staticmethod(map_here)
