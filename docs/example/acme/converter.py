"""Logits that cannot grow without bound (Gemma 2, section 2)."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from torchtitan.transforms import CONVERTERS, Converter


class SoftCapped(nn.Linear):
    """A linear map, of the weight of ``linear``, whose outputs stay between ``-cap`` and ``cap``."""

    def __init__(self, linear: nn.Linear, cap: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(super().forward(x) / self.cap)


@CONVERTERS.register("soft_cap")
def soft_cap(*, cap: Annotated[float, Field(gt=0, description="what no logit exceeds")] = 30.0) -> Converter:
    """A soft bound on the logits."""

    def convert(model: nn.Module) -> None:
        head = model.get_submodule("output")
        if isinstance(head, nn.Linear):  # a stage of a pipeline may have none
            model.set_submodule("output", SoftCapped(head, cap))

    return convert
