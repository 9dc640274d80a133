"""The inverse square root of the step (Vaswani et al. 2017, section 5.3)."""

from typing import Annotated

from pydantic import Field

from torchtitan.optim.schedules import SCHEDULES, Schedule


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(
    total_steps: int, *, warmup_steps: Annotated[int, Field(ge=1, description="steps of linear warm-up")] = 200
) -> Schedule:
    """Linear warm-up, then a fall with the inverse square root of the step."""
    return lambda step: min(step / warmup_steps, (warmup_steps / step) ** 0.5)
