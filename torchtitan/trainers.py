"""Trainers by name, for steps other than the usual one; the usual one, and what there is to override, is in trainer.py.

No step stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of trainers
    from torchtitan.distributed.world import World
    from torchtitan.resolve.job import Job
    from torchtitan.trainer import Trainer

TRAINERS: Registry[Callable[..., Trainer]] = Registry("trainer", home=__name__, receives=("job", "world"))
"""Of ``trainer.Trainer`` and its subclasses, whose keyword-only parameters are keys of ``[trainer]``."""


@TRAINERS.register("default")
def default(job: Job, world: World) -> Trainer:
    """One update by the gradients of the batch, clipped to ``training.max_norm``."""
    from torchtitan.trainer import Trainer

    return Trainer(job, world)
