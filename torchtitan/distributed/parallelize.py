"""From a model family to a runner: the order in which everything is applied, on one screen.

How each step is done is in the file named after it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.data.batch import Batch
from torchtitan.distributed.fsdp import Precision, Reshard, apply_fsdp
from torchtitan.distributed.topology import Topology
from torchtitan.loss import Loss
from torchtitan.models.init import draw, find_rule
from torchtitan.models.spec import ModelSpec
from torchtitan.transforms import Converter


class Runner(Protocol):
    """What trains: a whole model, or the stages of one that this rank holds (``parts``)."""

    @property
    def parts(self) -> Sequence[nn.Module]: ...

    def forward_backward(self, batch: Batch, num_valid: float) -> Tensor:
        """Add the gradients of ``batch`` and return its share of the loss: the sum over its valid labels divided by
        ``num_valid``, those of the whole global batch."""
        ...


class WholeRunner:
    """Runs a model that this rank holds from stem to head."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model = model
        self._loss = loss

    @property
    def parts(self) -> Sequence[nn.Module]:
        return [self._model]

    def forward_backward(self, batch: Batch, num_valid: float) -> Tensor:
        logits = self._model(batch.tokens, batch.positions)
        loss = self._loss(logits, batch.labels) / num_valid
        del logits  # the backward pass can reuse its memory
        loss.backward()
        return loss.detach()


def parallelize(
    spec: ModelSpec,
    args: Any,
    topology: Topology,
    *,
    loss: Loss,
    converters: Sequence[Converter],
    device: torch.device,
    seed: int,
    precision: Precision,
    reshard: Reshard,
    cpu_offload: bool,
) -> Runner:
    """Build on meta, convert, shard, materialise, initialise."""
    model = spec.build_meta(args)
    for convert in converters:
        convert(model)
    model.to(dtype=precision.storage)
    apply_fsdp(
        model,
        spec.layout,
        topology.fsdp,
        precision=precision,
        reshard=reshard,
        cpu_offload=cpu_offload,
        tied=bool(spec.tied(args)),
    )
    model.to_empty(device="cpu" if cpu_offload else device)
    init_weights(model, spec, args, seed)
    return WholeRunner(model, loss)


@torch.no_grad()
def init_weights(model: nn.Module, spec: ModelSpec, args: Any, seed: int) -> None:
    """Fill this rank's part of every parameter with the family's initial weights, without communication."""
    rules = spec.init(args)
    for name, parameter in model.named_parameters():
        rule = find_rule(rules, name)
        if isinstance(parameter, DTensor):
            # The box that a distributed checkpoint stores for this rank.
            for chunk in parameter.__create_chunk_list__():
                parameter.to_local().copy_(draw(name, parameter.shape, rule, seed, chunk.offsets, chunk.sizes))
        else:
            parameter.copy_(draw(name, parameter.shape, rule, seed, [0] * parameter.dim(), parameter.shape))
