"""Lion: the sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

from typing import Annotated, Any

import torch
from pydantic import Field

from torchtitan.optim.optimizers import OPTIMIZERS, Beta, Groups


@OPTIMIZERS.register("Lion")
class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay."""

    def __init__(
        self,
        groups: Groups,
        *,
        beta1: Annotated[Beta, Field(description="weight of the momentum in the update")] = 0.9,
        beta2: Annotated[Beta, Field(description="decay of the momentum")] = 0.99,
        weight_decay: Annotated[float, Field(ge=0, description="decoupled weight decay")] = 0.1,
    ) -> None:
        super().__init__(groups, {"betas": (beta1, beta2), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.lerp(gradient, momentum, beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - beta2)
