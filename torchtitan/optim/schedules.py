"""Learning-rate schedules: pure functions from the step to a factor of the peak rate.

They keep no state: a run that goes on at step k has the rate of step k. Base rates are the optimizer's.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from torchtitan.errors import ConfigError
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
    "exponential": lambda progress: 2 * 0.5**progress - 1,
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
        Literal["linear", "sqrt", "cosine", "constant", "exponential"], Field(description="shape of the decay")
    ] = "linear",
    min_lr_factor: Annotated[float, Field(ge=0, le=1, description="floor, as a factor of the peak rate")] = 0.0,
    restarts: Annotated[
        list[Annotated[int, Field(ge=1)]],
        Field(description="steps after which the curve begins anew, each time with a decay of its own"),
    ] = [],  # noqa: B006, nobody changes it
    restart_warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up after a restart")] = 0,
) -> Schedule:
    """Linear warm-up, a plateau, and a decay (Hu et al. 2024, MiniCPM, section 4).

    The first step after the warm-up is at the full rate, and the decay is one step longer than the training, so that
    the last step still has a rate above the floor. With ``restarts`` each piece between them is such a curve, whose
    ``decay_ratio`` is a share of that piece: warm restarts (Loshchilov and Hutter 2017, SGDR, section 3), with a
    plateau those of WSD-S (Wen et al. 2024, section 4). The exponential shape is half an exponential down to the
    floor, 2 · 0.5^progress − 1.
    """
    _check_restarts(restarts, total_steps)
    if restart_warmup_steps and not restarts:
        raise ConfigError(
            "lr_scheduler.restart_warmup_steps", "there is no restart; name steps in lr_scheduler.restarts"
        )
    starts = [0, *restarts]
    pieces = [
        _curve(
            end - start,
            warmup_steps=restart_warmup_steps if start else warmup_steps,
            warmup_key="restart_warmup_steps" if start else "warmup_steps",
            decay_ratio=decay_ratio,
            shape=_SHAPES[decay_type],
            floor=min_lr_factor,
        )
        for start, end in zip(starts, [*restarts, total_steps], strict=True)
    ]

    def factor(step: int) -> float:
        piece = bisect.bisect_left(starts, step) - 1
        return pieces[piece](step - starts[piece])

    return factor


def _curve(
    steps: int,
    *,
    warmup_steps: int,
    warmup_key: str,
    decay_ratio: float | None,
    shape: Callable[[float], float],
    floor: float,
) -> Schedule:
    """One warm-up, plateau and decay over ``steps``."""
    warmup = min(warmup_steps, steps)
    if warmup < warmup_steps:
        logger.warning(f"lr_scheduler.{warmup_key}={warmup_steps} is cut to the {steps} steps of the schedule")
    decay = steps if decay_ratio is None else round(steps * decay_ratio)
    if decay_ratio and not decay:
        logger.warning(f"lr_scheduler.decay_ratio={decay_ratio} of {steps} steps is no whole step: they do not decay")
    decay = min(decay, steps - warmup)
    decay_start = steps + 1 - decay

    def factor(step: int) -> float:
        if step <= warmup:
            return step / warmup
        if step <= decay_start or decay == 0:
            return 1.0
        progress = min((step - decay_start) / decay, 1.0)
        return floor + (1 - floor) * shape(progress)

    return factor


def _check_restarts(restarts: Sequence[int], total_steps: int) -> None:
    for before, after in itertools.pairwise(restarts):
        if after <= before:
            raise ConfigError("lr_scheduler.restarts", f"must increase, but {after} comes after {before}")
    if restarts and restarts[-1] >= total_steps:
        raise ConfigError(
            "lr_scheduler.restarts",
            f"{restarts[-1]} leaves no step after it: the schedule has {total_steps} (lr_scheduler.total_steps, else "
            "training.steps); drop it or lengthen the schedule",
        )
