"""Optimizers by name, and what each may be told.

Which of them updates which parameters is in ``groups.py``, rates over time in ``schedules.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
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


@OPTIMIZERS.register("SGD")
def sgd(
    groups: Groups,
    *,
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the last update that is kept; 0: none")] = 0.9,
    dampening: Annotated[float, Field(ge=0, le=1, description="share of the gradient left out of the momentum")] = 0.0,
    nesterov: Annotated[bool, Field(description="look ahead along the momentum")] = False,
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty, added to the gradient")] = 0.1,
    # PyTorch cannot spread its fused kernel over ranks.
    implementation: Annotated[
        Literal["for-loop", "foreach"], Field(description="one kernel a parameter, or one over many parameters")
    ] = "foreach",
) -> Optimizer:
    """Stochastic gradient descent with momentum (Sutskever et al. 2013, section 2)."""
    from torch.optim import SGD

    return SGD(
        groups,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        **_kernel(implementation),
    )


def _kernel(implementation: str) -> dict[str, bool]:
    return {"foreach": implementation == "foreach", "fused": implementation == "fused"}
