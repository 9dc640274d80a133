"""From a model family to a runner: the order in which everything is applied, on one screen.

How each step is done is in the file named after it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.data.batch import Batch
from torchtitan.distributed.context import ContextSplit, apply_context_parallel, apply_mask
from torchtitan.distributed.fsdp import Precision, apply_fsdp
from torchtitan.distributed.pipeline import PipelineRunner, prune
from torchtitan.distributed.spread import Spread
from torchtitan.distributed.tensor import apply_tensor_parallel, loss_context, loss_on_spread_logits
from torchtitan.distributed.topology import Topology
from torchtitan.loss import Loss
from torchtitan.models.init import draw, find_rule
from torchtitan.models.spec import ModelSpec
from torchtitan.transforms import Converter


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


class WholeRunner:
    """Runs a model that this rank holds from stem to head."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        take: Callable[[Batch], Batch],
        loss_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.parts: Sequence[nn.Module] = [model]
        self.named_parameters = list(model.named_parameters())
        self.duplicates: Sequence[nn.Parameter] = ()
        self._model = model
        self._loss = loss
        self._take = take
        self._loss_context = loss_context

    def forward_backward(self, batches: Sequence[Batch], num_valid: float) -> Tensor:
        losses = []
        with self._loss_context():
            for batch in batches:
                loss = self._forward(batch, num_valid)
                loss.backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, batch: Batch, num_valid: float) -> Tensor:
        with self._loss_context():
            return self._forward(batch, num_valid)

    def _forward(self, batch: Batch, num_valid: float) -> Tensor:
        batch = self._take(batch)
        # The logits are not kept by a name: the backward pass can reuse their memory.
        return self._loss(self._model(batch.tokens, batch.positions), batch.labels) / num_valid


def parallelize(
    spec: ModelSpec,
    args: Any,
    topology: Topology,
    spread: Spread,
    *,
    loss: Loss,
    converters: Sequence[Converter],
    device: torch.device,
    seed: int,
    precision: Precision,
    cpu_offload: bool,
) -> Runner:
    """Build on meta, cut into stages, convert, split, shard, materialise, initialise."""
    pipeline, tensor, context = topology.pipeline, topology.tensor, topology.context
    split = None if context is None else ContextSplit(context, spread.context_method, spread.head_tail)
    stages = [None] if spread.pipeline is None or pipeline is None else spread.pipeline.stages_of(pipeline.rank)
    tied = spec.tied(args) if pipeline is None else {}
    parts = []
    for names in stages:
        part = spec.build_meta(args)
        if names is not None:
            prune(part, spec.layout, names)
        for convert in converters:
            convert(part)
        part.to(dtype=precision.storage)
        if tensor is not None:
            apply_tensor_parallel(part, spec.roles, tied, tensor, spread_logits=spread.spread_logits)
        if split is not None:
            apply_context_parallel(part, spec.layout, split, spread.mask)
        else:
            apply_mask(part, spec.layout, spread.mask)
        apply_fsdp(
            part,
            spec.layout,
            topology.fsdp,
            precision=precision,
            reshard=spread.reshard,
            cpu_offload=cpu_offload,
            tied=bool(tied),
        )
        part.to_empty(device="cpu" if cpu_offload else device)
        init_weights(part, spec, args, seed)
        parts.append(part)
    spread_logits = tensor is not None and spread.spread_logits
    seams: Any = {
        "loss": loss_on_spread_logits(loss, tensor) if tensor is not None and spread.spread_logits else loss,
        "take": split.take if split is not None else _all_of_it,
        "loss_context": partial(loss_context, spread_logits),
    }
    if pipeline is None or spread.pipeline is None:
        return WholeRunner(parts[0], **seams)
    return PipelineRunner(
        spread.pipeline,
        parts,
        pipeline,
        device=device,
        micro_batch_size=spread.rows_multiple,
        tied=spec.tied(args),
        **seams,
    )


def _all_of_it(batch: Batch) -> Batch:
    return batch


@torch.no_grad()
def init_weights(model: nn.Module, spec: ModelSpec, args: Any, seed: int) -> None:
    """Fill this rank's part of every parameter with the family's initial weights, without communication."""
    rules, tied = spec.init(args), spec.tied(args)
    for name, parameter in model.named_parameters():
        name = tied.get(name, name)  # in a later stage, a copy of what the first one holds
        rule = find_rule(rules, name)
        if isinstance(parameter, DTensor):
            # The box that a distributed checkpoint stores for this rank.
            for chunk in parameter.__create_chunk_list__():
                parameter.to_local().copy_(draw(name, parameter.shape, rule, seed, chunk.offsets, chunk.sizes))
        else:
            parameter.copy_(draw(name, parameter.shape, rule, seed, [0] * parameter.dim(), parameter.shape))
