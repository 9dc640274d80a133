"""Optimizers by name, and how parameters are sorted into their groups by name.

Rates over time are in ``schedules.py``; gradients in ``distributed/gradients.py``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from torchtitan.errors import ConfigError
from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch import Tensor
    from torch.optim import Optimizer

Groups = list[dict[str, Any]]
"""What torch.optim takes: dicts with ``params`` and options of that group, ``lr`` always among them."""

OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer", home=__name__, receives=("groups",))

Beta = Annotated[float, Field(ge=0, lt=1)]
Implementation = Annotated[
    Literal["for-loop", "foreach", "fused"],
    Field(description="one kernel a parameter, one over many parameters, or one for the whole update"),
]


@OPTIMIZERS.register("AdamW")
def adamw(
    groups: Groups,
    *,
    beta1: Annotated[Beta, Field(description="decay of the first moment")] = 0.9,
    beta2: Annotated[Beta, Field(description="decay of the second moment")] = 0.95,
    eps: Annotated[float, Field(gt=0, description="added to the root of the second moment")] = 1e-8,
    weight_decay: Annotated[float, Field(ge=0, description="decoupled weight decay")] = 0.1,
    implementation: Implementation = "fused",
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    from torch.optim import AdamW

    return AdamW(groups, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, **_kernel(implementation))


@OPTIMIZERS.register("Adam")
def adam(
    groups: Groups,
    *,
    beta1: Annotated[Beta, Field(description="decay of the first moment")] = 0.9,
    beta2: Annotated[Beta, Field(description="decay of the second moment")] = 0.95,
    eps: Annotated[float, Field(gt=0, description="added to the root of the second moment")] = 1e-8,
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty, added to the gradient")] = 0.1,
    implementation: Implementation = "fused",
) -> Optimizer:
    """Adam (Kingma and Ba 2015)."""
    from torch.optim import Adam

    return Adam(groups, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, **_kernel(implementation))


def _kernel(implementation: str) -> dict[str, bool]:
    return {"foreach": implementation == "foreach", "fused": implementation == "fused"}


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]], *, lr: float, weight_decay_exclude: Sequence[str]
) -> Groups:
    """The parameters that decay, and those whose name matches a pattern of ``weight_decay_exclude``."""
    decayed: list[Tensor] = []
    excluded: list[Tensor] = []
    for name, parameter in named_parameters:
        matches = any(fnmatch.fnmatchcase(name, pattern) for pattern in weight_decay_exclude)
        (excluded if matches else decayed).append(parameter)
    groups: Groups = [{"params": decayed, "lr": lr}, {"params": excluded, "lr": lr, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_patterns(names: Sequence[str], patterns: Sequence[str]) -> None:
    """ConfigError for a pattern of ``optimizer.weight_decay_exclude`` that matches none of the model's ``names``."""
    for pattern in sorted(patterns):
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                "optimizer.weight_decay_exclude",
                f"no parameter matches {pattern!r}; "
                "names look like layers.0.attention.wq.weight, so try '*norm.weight'",
            )
