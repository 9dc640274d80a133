"""Sharpness-aware minimisation (Foret et al. 2021, algorithm 1): update by the gradients at a worse point nearby."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.data.batch import Batch
from torchtitan.distributed.world import World
from torchtitan.resolve.job import Job
from torchtitan.trainer import Trainer
from torchtitan.trainers import TRAINERS


@TRAINERS.register("sharpness_aware")
class SharpnessAware(Trainer):
    """Update by the gradients at the worst point within a radius."""

    def __init__(
        self, job: Job, world: World, *, radius: Annotated[float, Field(gt=0, description="of the ascent")] = 0.05
    ) -> None:
        super().__init__(job, world)
        self.radius = radius

    def gradients(self, batches: Sequence[Batch], num_valid: float) -> tuple[Tensor, Tensor]:
        loss, norm = super().gradients(batches, num_valid)
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in moved]
        with torch.no_grad():
            for parameter in moved:
                parameter.add_(parameter.grad * (self.radius / (norm + 1e-12)))
        _, norm = super().gradients(batches, num_valid)
        with torch.no_grad():
            for parameter, value in zip(moved, before, strict=True):
                parameter.copy_(value)
        return loss, norm
