"""Pipeline parallelism at work: cuts a model down to a stage, and moves the batches of a step through all stages.

What makes up a stage is decided in ``stages.py``, in which order ranks compute in ``schedules.py``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.data.batch import Batch
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.runner import Seams
from torchtitan.distributed.schedules import build_stage, evaluation_schedule, training_schedule
from torchtitan.distributed.stages import PipelinePlan
from torchtitan.distributed.topology import Axis
from torchtitan.models.spec import Layout


class PassOn(nn.Module):
    """Stands where a stage lacks a module: returns its first input."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def prune(model: nn.Module, layout: Layout, names: Collection[str]) -> None:
    """Leave of ``model`` the stage that has the modules ``names``, by taking out other blocks and putting ``PassOn``
    where the stem or the head was."""
    blocks = model.get_submodule(layout.blocks)
    for block, _ in list(blocks.named_children()):
        if f"{layout.blocks}.{block}" not in names:
            delattr(blocks, block)
    for name in (*layout.stem, *layout.head):
        if name not in names:
            model.set_submodule(name, PassOn())


class PipelineRunner:
    """Runs the stages of one rank together with its pipeline peers, all of which call the same methods at once.

    ``parts`` are the stages of this rank as ``plan`` places them. A batch passes as micro-batches of
    ``micro_batch_size`` rows. ``tied`` maps the second name of a weight that the first and the last stage use to its
    first: each has a copy of its own, kept equal by giving both the sum of their gradients.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        parts: Sequence[nn.Module],
        axis: Axis,
        seams: Seams,
        *,
        device: torch.device,
        micro_batch_size: int,
        tied: Mapping[str, str],
    ) -> None:
        self.parts = parts
        own = [(name, p) for part in parts for name, p in part.named_parameters()]
        self.named_parameters: Sequence[tuple[str, nn.Parameter]] = [(tied.get(name, name), p) for name, p in own]
        self.duplicates: Sequence[nn.Parameter] = [p for name, p in own if name in tied]
        self._plan, self._axis, self._device = plan, axis, device
        self._micro_batch_size = micro_batch_size
        self._seams = seams
        self._tied = [_Tie(dict(own), plan, axis, first, second) for second, first in tied.items()]
        self._num_valid = 1.0
        # For training and for evaluation, which take turns.
        self._flushes: dict[bool, _Flush] = {}

    def forward_backward(self, batches: Sequence[Batch], num_valid: float) -> Tensor:
        losses = [self._run(batch, num_valid, train=True) for batch in batches]
        for tie in self._tied:
            tie.add_gradients()
        self._seams.complete_gradients([parameter for _, parameter in self.named_parameters])
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, batch: Batch, num_valid: float) -> Tensor:
        return self._run(batch, num_valid, train=False)

    def _run(self, batch: Batch, num_valid: float, *, train: bool) -> Tensor:
        """This rank's share of the loss on ``batch``, by one flush of the pipeline."""
        batch = self._seams.take(batch)
        self._num_valid = num_valid
        flush = self._flushes.get(train)
        kept: list[tuple[nn.Parameter, Tensor]] = []
        if flush is None or flush.shape != batch.tokens.shape:
            flush = self._flushes[train] = self._build(batch.tokens.shape, train)
            # On its first run torch tries the stages out and drops all gradients.
            kept = [(p, p.grad) for _, p in self.named_parameters if p.grad is not None]
            for parameter, _ in kept:
                parameter.grad = None
        local = self._plan.indices_of(self._axis.rank)
        last = len(self._plan.stages) - 1
        losses: list[Tensor] = []
        run = flush.schedule.step if train else flush.schedule.eval
        run(
            *([batch.tokens] if 0 in local else []),
            target=batch.labels if last in local else None,
            losses=losses if last in local else None,
            return_outputs=False,
            positions=batch.positions,
        )
        for parameter, gradient in kept:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_part(parameter.grad).add_(local_part(gradient))
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)

    def _build(self, shape: torch.Size, train: bool) -> "_Flush":
        number, plan = shape[0] // self._micro_batch_size, self._plan
        if shape[0] % self._micro_batch_size:
            raise ValueError(f"{shape[0]} rows cannot be cut into micro-batches of {self._micro_batch_size}")
        stages = [
            build_stage(part, stage, len(plan.stages), self._device, self._axis.group)
            for stage, part in zip(plan.indices_of(self._axis.rank), self.parts, strict=True)
        ]
        if train:
            name = plan.schedule if plan.order is None else None
            schedule = training_schedule(name, plan.order_for(number), stages, number, self._share)
        else:
            schedule = evaluation_schedule(plan.placement, stages, number, self._share)
        return _Flush(shape, schedule)

    def _share(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._seams.loss(logits, labels) / self._num_valid


@dataclass(frozen=True)
class _Flush:
    """What takes a batch through the pipeline; its buffers fit batches of ``shape`` and no others."""

    shape: torch.Size
    schedule: Any


class _Tie:
    """The copies of one weight under two names: those on this rank, and the rank that has the other, if any."""

    def __init__(
        self, own: Mapping[str, nn.Parameter], plan: PipelinePlan, axis: Axis, first: str, second: str
    ) -> None:
        ranks = {plan.placement[plan.stage_of(name)] for name in (first, second)}
        self._copies = [own[name] for name in (first, second) if name in own]
        self._peer = next(iter(ranks - {axis.rank}), None) if axis.rank in ranks else None
        self._group = axis.group

    def add_gradients(self) -> None:
        """Give every copy the sum of all gradients; the same bits everywhere, since a + b = b + a."""
        gradients = [local_part(copy.grad) for copy in self._copies if copy.grad is not None]
        if self._peer is not None:
            (mine,) = gradients
            theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
            peer = dist.get_global_rank(self._group, self._peer)
            exchange = [
                dist.P2POp(dist.isend, mine.contiguous(), peer, self._group),
                dist.P2POp(dist.irecv, theirs, peer, self._group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(theirs)
        elif gradients:
            first, second = gradients
            first.copy_(second.add_(first))
