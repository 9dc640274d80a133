"""What trains: the interface between a step and the model however it is spread, and the runner of a whole model.

Stages of a model are run in ``pipeline.py``; how a model is spread is in ``parallelize.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.data.batch import Batch
from torchtitan.loss.losses import Loss


class Runner(Protocol):
    """What trains: a whole model, or the stages of one that this rank holds."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The modules of this rank, in the order the data passes them."""
        ...

    @property
    def named_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The parameters of all parts by the names that they have in the whole model. Where a tied weight stands in
        two stages of this rank, its name comes twice."""
        ...

    @property
    def duplicates(self) -> Sequence[nn.Parameter]:
        """Those parameters that another stage holds as well and counts; they stay equal to theirs."""
        ...

    def forward_backward(self, batches: Sequence[Batch], num_valid: float) -> Tensor:
        """Add the gradients of a step's ``batches`` and return this rank's share of the loss: the sum over their valid
        labels divided by ``num_valid``, those of the whole global batch."""
        ...

    def evaluate(self, batch: Batch, num_valid: float) -> Tensor:
        """This rank's share of the loss on ``batch``, with no gradients and no trace."""
        ...


def everything(batch: Batch) -> Batch:
    return batch


def nothing(parameters: Sequence[Tensor]) -> None:
    pass


@dataclass(frozen=True)
class Seams:
    """Where the axes reach into a run: ``take`` gives this rank's part of a batch, ``loss`` is summed over its labels,
    and ``complete_gradients`` is called with all parameters after the last backward pass of a step."""

    loss: Loss
    take: Callable[[Batch], Batch] = everything
    complete_gradients: Callable[[Sequence[Tensor]], None] = nothing


class WholeRunner:
    """Runs a model that this rank holds from stem to head."""

    def __init__(self, model: nn.Module, seams: Seams) -> None:
        self.parts: Sequence[nn.Module] = [model]
        self.named_parameters = list(model.named_parameters())
        self.duplicates: Sequence[nn.Parameter] = ()
        self._model = model
        self._seams = seams

    def forward_backward(self, batches: Sequence[Batch], num_valid: float) -> Tensor:
        losses = []
        for batch in batches:
            loss = self._forward(batch, num_valid)
            loss.backward()
            losses.append(loss.detach())
        self._seams.complete_gradients([parameter for _, parameter in self.named_parameters])
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, batch: Batch, num_valid: float) -> Tensor:
        loss = self._forward(batch, num_valid)
        # Weights that stay gathered until a backward pass would hide whatever changes the shards meanwhile.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss

    def _forward(self, batch: Batch, num_valid: float) -> Tensor:
        batch = self._seams.take(batch)
        # The logits are not kept by a name: the backward pass can reuse their memory.
        return self._seams.loss(self._model(batch.tokens, batch.positions), batch.labels) / num_valid
