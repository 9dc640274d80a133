"""Schedules of a pipeline: in which order each rank computes, how long it waits by that, and what runs it.

How a model is cut into stages is in ``stages.py``, the file that may hold a schedule in ``schedule_file.py``. Private
names of torch.distributed.pipelining stand here and nowhere else; it is imported late, since it costs seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.registry import unknown_name

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

KEY = "parallelism.pipeline_parallel_schedule"

DURATION = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Time of an action where that of a forward pass is 1, as in Zero Bubble Pipeline Parallelism (Qi et al. 2023)."""


class Action(NamedTuple):
    """What a rank computes of one micro-batch in one stage: F the forward pass, B the backward pass, or the latter in
    two halves, I for the gradients of inputs and W for those of weights."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Step = tuple[Action, ...]
"""One action, or a forward and a backward one whose communication overlaps."""

Order = tuple[tuple[Step, ...], ...]
"""The steps of each rank, by rank."""


@dataclass(frozen=True)
class Family:
    """What a schedule asks of a pipeline: how many stages a rank (None: two or more), whether they turn back at the
    last rank (V) or begin again at the first, whether it runs backward passes in two halves, and what number of
    micro-batches it can run, in words and by (ranks, stages, micro-batches)."""

    stages_a_rank: int | None
    v: bool = False
    splits_backward: bool = False
    needs: str = ""
    fits: Callable[[int, int, int], bool] = lambda ranks, stages, n: True


def _as_many_as_stages(ranks: int, stages: int, n: int) -> bool:
    return n >= stages


def _equal_rounds(ranks: int, stages: int, n: int) -> bool:
    return n % max(1, n // ranks) == 0


_AS_MANY = "at least one for each stage"
_ROUNDS = "fewer than twice the ranks, or equal rounds of at least one for each rank"

SCHEDULES: dict[str, Family] = {
    "1F1B": Family(1, needs=_AS_MANY, fits=_as_many_as_stages),
    "GPipe": Family(1),
    "Interleaved1F1B": Family(None, needs=_ROUNDS, fits=_equal_rounds),
    "LoopedBFS": Family(None),
    "InterleavedZeroBubble": Family(None, splits_backward=True, needs=_ROUNDS, fits=_equal_rounds),
    "ZBVZeroBubble": Family(2, v=True, splits_backward=True),
    "DualPipeV": Family(2, v=True, splits_backward=True, needs=_AS_MANY, fits=_as_many_as_stages),
}


def find_schedule(name: str) -> str:
    """The schedule of that name, in whatever case, as it is spelled here; ConfigError if there is none."""
    for known in SCHEDULES:
        if known.lower() == name.lower():
            return known
    raise unknown_name("schedule", name, SCHEDULES, key=KEY)


def place_stages(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each stage."""
    if SCHEDULES[schedule].v:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(stages))


@lru_cache(maxsize=32)
def order_of(schedule: str, ranks: int, stages: int, micro_batches: int) -> Order:
    """What each rank computes, in its order."""
    if schedule == "GPipe":
        return _each(ranks, lambda rank: _all_passes([rank], micro_batches))
    if schedule == "1F1B":
        return _each(ranks, lambda rank: _one_forward_one_backward(rank, ranks, micro_batches))
    return _order_of_torch(schedule, ranks, stages, micro_batches)


def _each(ranks: int, actions: Callable[[int], Sequence[Action]]) -> Order:
    return tuple(tuple((action,) for action in actions(rank)) for rank in range(ranks))


def _all_passes(stages: Sequence[int], micro_batches: int) -> list[Action]:
    """All forward passes, stage by stage, and then all backward passes."""
    forward = [Action("F", stage, m) for stage in stages for m in range(micro_batches)]
    return [*forward, *(Action("B", stage, m) for stage in reversed(stages) for m in range(micro_batches))]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """PipeDream-Flush (Narayanan et al. 2021): a backward pass follows each forward pass once the pipeline is full."""
    ahead = min(micro_batches, ranks - rank) - 1
    actions = [Action("F", rank, m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [Action("F", rank, m), Action("B", rank, m - ahead)]
    return [*actions, *(Action("B", rank, m) for m in range(micro_batches - ahead, micro_batches))]


def _order_of_torch(schedule: str, ranks: int, stages: int, micro_batches: int) -> Order:
    """The order that torch's class would run, asked of one that has neither stages nor processes."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    class Planned(get_schedule_class(schedule)):  # type: ignore[misc]
        def _prepare_schedule_with_comms(self, *_: Any, **__: Any) -> None:
            """Sends and receives are not needed to know the order."""

    nothing = SimpleNamespace(submod=nn.Module(), num_stages=stages, group_size=ranks, group_rank=0)
    rows = Planned([nothing] * (stages // ranks), micro_batches).pipeline_order
    return tuple(tuple(_step(action) for action in rows[rank] if action is not None) for rank in range(ranks))


def _step(action: Any) -> Step:
    """A step of ours from an action of torch."""
    if action.sub_actions is not None:
        return tuple(_step(part)[0] for part in action.sub_actions)
    return (Action(action.computation_type.value, action.stage_index, action.microbatch_index),)


class Stuck(Exception):
    """Ranks would wait for each other for ever: ``rank`` for what ``action`` needs, which is ``missing``."""

    def __init__(self, rank: int, action: Action, missing: str) -> None:
        super().__init__(f"rank {rank} waits at {action} for {missing}, which comes only after it or not at all")
        self.rank, self.action, self.missing = rank, action, missing


def bubble(order: Order) -> float:
    """The share of the time that ranks spend waiting, from 0 to 1, if an action takes ``DURATION``, all stages are
    equal and sending costs nothing. Stuck if the order cannot be run to its end."""
    last = max(action.stage for steps in order for step in steps for action in step)
    done: dict[tuple[str, int, int], float] = {}  # (F, or G for the gradient of a stage's input, stage, micro-batch)
    clock = [0.0] * len(order)
    at = [0] * len(order)
    waiting = True
    while waiting:
        waiting, moved = False, False
        for rank, steps in enumerate(order):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                needs = [need for action in step for need in _needs(action, last)]
                if not all(need in done for need in needs):
                    waiting = True
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + sum(DURATION[action.kind] for action in step)
                for action in step:
                    if action.kind != "W":
                        done["F" if action.kind == "F" else "G", action.stage, action.micro_batch] = clock[rank]
                at[rank] += 1
                moved = True
        if waiting and not moved:
            raise _stuck(
                [(rank, steps[at[rank]]) for rank, steps in enumerate(order) if at[rank] < len(steps)], done, last
            )
    busy = sum(DURATION[action.kind] for steps in order for step in steps for action in step)
    return 1.0 - busy / (len(order) * max(clock))


def _stuck(waiting: list[tuple[int, Step]], done: Collection[tuple[str, int, int]], last: int) -> Stuck:
    missing = [
        (rank, action, need)
        for rank, step in waiting
        for action in step
        for need in _needs(action, last)
        if need not in done
    ]
    # Who waits for itself is the cause, others wait for the same.
    rank, action, (kind, stage, m) = min(missing, key=lambda found: found[1].stage != found[2][1])
    return Stuck(rank, action, f"{stage}{'F' if kind == 'F' else 'B'}{m}")


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    kind, stage, m = action
    if kind == "F":
        return [("F", stage - 1, m)] if stage > 0 else []
    if kind == "W":
        return [("G", stage, m)]
    return [("F", stage, m), *([("G", stage + 1, m)] if stage < last else [])]


def build_stage(
    part: nn.Module, stage: int, stages: int, device: torch.device, group: dist.ProcessGroup
) -> PipelineStage:
    """One of this rank's stages, for a schedule below."""
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            # Before 2.13 torch greets neighbours on the rank itself as well, which gloo cannot.
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            # Before 2.13 its trial of the module draws from the generators that the step has seeded.
            devices = [] if self.device.type == "cpu" else [self.device]
            with torch.random.fork_rng(devices, device_type=self.device.type):
                return super()._prepare_forward_infra(*args, **kwargs)

    return Stage(part, stage, stages, device, group=group)


Losses = Callable[[Tensor, Tensor], Tensor]


def training_schedule(schedule: str | None, order: Order, stages: Sequence[PipelineStage], n: int, loss: Losses) -> Any:
    """What runs ``n`` micro-batches through this rank's stages and back in ``order``; ``schedule`` is None if the order
    has no name.

    Gradients are sums: ``loss`` is divided by what it has to be already.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    if schedule is not None and SCHEDULES[schedule].stages_a_rank == 1:
        # These have runtimes of their own, which join a send and the receive that follows it.
        return get_schedule_class(schedule)(stages[0], n, loss_fn=loss, scale_grads=False)
    return _runtime(order, stages, n, loss)


def evaluation_schedule(placement: Sequence[int], stages: Sequence[PipelineStage], n: int, loss: Losses) -> Any:
    """What runs any number ``n`` of micro-batches through this rank's stages by its method ``eval``.

    Training schedules cannot all: some need more micro-batches, and those in a V pass gradients on in any case.
    """
    from torch.distributed.pipelining import ScheduleGPipe

    def forgetting(logits: Tensor, labels: Tensor) -> Tensor:
        # Without backward passes torch would keep the logits of all micro-batches to the end.
        stages[-1].fwd_cache.clear()
        return loss(logits, labels)

    ranks = max(placement) + 1
    if ranks == len(placement):
        return ScheduleGPipe(stages[0], n, loss_fn=forgetting, scale_grads=False)
    local = [[stage for stage, owner in enumerate(placement) if owner == rank] for rank in range(ranks)]
    schedule = _runtime(_each(ranks, lambda rank: _all_passes(local[rank], n)), stages, n, forgetting)
    forward = {"F", "UNSHARD", "RESHARD", "SEND_F", "RECV_F"}
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.value in forward]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    return schedule


def _runtime(order: Order, stages: Sequence[PipelineStage], n: int, loss: Losses) -> Any:
    """Torch's runtime of an order, with the communication that the order needs put in."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

    def theirs(action: Action) -> _Action:
        return _Action(action.stage, _ComputationType(action.kind), action.micro_batch)

    def actions(step: Step) -> _Action:
        if len(step) == 1:
            return theirs(step[0])
        return _Action(-1, _ComputationType.OVERLAP_F_B, None, tuple(theirs(action) for action in step))

    runtime = _PipelineScheduleRuntime(list(stages), n, loss_fn=loss, scale_grads=False)
    runtime._prepare_schedule_with_comms({rank: [actions(step) for step in steps] for rank, steps in enumerate(order)})
    return runtime
