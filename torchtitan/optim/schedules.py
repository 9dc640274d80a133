"""Learning-rate schedules: pure functions from the step to a factor of the peak rate.

They keep no state: a run that goes on at step k has the rate of step k. Base rates are the optimizer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from torchtitan.log import logger
from torchtitan.registry import Registry

Schedule = Callable[[int], float]
"""Step, from 1 on, → factor of the peak learning rate."""

SCHEDULES: Registry[Callable[..., Schedule]] = Registry(
    "learning-rate schedule", home=__name__, receives=("total_steps",)
)

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
}


@SCHEDULES.register("warmup_stable_decay")
def warmup_stable_decay(
    total_steps: int,
    *,
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up")] = 200,
    decay_ratio: Annotated[
        float | None, Field(ge=0, le=1, description="last share of the steps that decays; none: all after the warm-up")
    ] = None,
    decay_type: Annotated[
        Literal["linear", "sqrt", "cosine", "constant"], Field(description="shape of the decay")
    ] = "linear",
    min_lr_factor: Annotated[float, Field(ge=0, le=1, description="floor, as a factor of the peak rate")] = 0.0,
) -> Schedule:
    """Linear warm-up, a plateau, and a decay (Hu et al. 2024, MiniCPM, section 4).

    The first step after the warm-up is at the full rate, and the decay is one step longer than the training, so that
    the last step still has a rate above the floor.
    """
    warmup = min(warmup_steps, total_steps)
    if warmup < warmup_steps:
        logger.warning(f"lr_scheduler.warmup_steps={warmup_steps} is cut to the {total_steps} steps of the schedule")
    decay = total_steps if decay_ratio is None else round(total_steps * decay_ratio)
    decay = min(decay, total_steps - warmup)
    decay_start = total_steps + 1 - decay
    shape = _SHAPES[decay_type]

    def factor(step: int) -> float:
        if step <= warmup:
            return step / warmup
        if step <= decay_start or decay == 0:
            return 1.0
        progress = min((step - decay_start) / decay, 1.0)
        return min_lr_factor + (1 - min_lr_factor) * shape(progress)

    return factor
