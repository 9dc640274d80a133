"""The plan of a pipeline: which modules make up each stage, which rank holds it, and which schedule runs them.

Everything here is computed from plain values before any process talks. The schedules themselves are in
``schedules.py``, what the plan does to a model in ``pipeline.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.distributed.schedule_file import KEY as FILE_KEY
from torchtitan.distributed.schedule_file import read_order
from torchtitan.distributed.schedules import KEY as SCHEDULE_KEY
from torchtitan.distributed.schedules import SCHEDULES, Order, bubble, find_schedule, order_of, place_stages
from torchtitan.errors import ConfigError
from torchtitan.models.spec import Layout

DEGREE_KEY = "parallelism.pipeline_parallel_degree"
LAYERS_KEY = "parallelism.pipeline_parallel_layers_per_stage"
MODULES_KEY = "parallelism.module_fqns_per_model_part"
ROWS_KEY = "training.local_batch_size"
GLOBAL_KEY = "training.global_batch_size"
SIZE_KEY = "parallelism.pipeline_parallel_microbatch_size"


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline of ``ranks``: the names of the modules of each of its ``stages``, the rank of each in ``placement``,
    and the ``schedule`` by name or, if it is one of the user's own, by its file, with the ``order`` from there.
    ``blocks`` counts the layers."""

    ranks: int
    stages: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    schedule: str
    blocks: int
    order: Order | None = None

    def indices_of(self, rank: int) -> tuple[int, ...]:
        """Which stages ``rank`` has, in the order the data passes them."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def stages_of(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """The names of the modules of each stage that ``rank`` has."""
        return tuple(self.stages[stage] for stage in self.indices_of(rank))

    def stage_of(self, parameter: str) -> int:
        """The stage that holds ``parameter``, by its name in the whole model."""
        for stage, modules in enumerate(self.stages):
            if any(parameter.startswith(f"{module}.") for module in modules):
                return stage
        raise LookupError(f"no stage holds {parameter}")

    def order_for(self, micro_batches: int) -> Order:
        """What each rank computes in a pass of ``micro_batches``."""
        if self.order is not None:
            return self.order
        return order_of(self.schedule, self.ranks, len(self.stages), micro_batches)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass may run in two halves, so that weights must stay whole in between."""
        if self.order is None:
            return SCHEDULES[self.schedule].splits_backward
        return any(action.kind == "I" for steps in self.order for step in steps for action in step)


def plan_pipeline(
    layout: Layout,
    blocks: Sequence[str],
    *,
    degree: int,
    schedule: str = "1F1B",
    csv: str = "",
    layers_per_stage: int | None = None,
    first_stage_less_layers: int = 1,
    last_stage_less_layers: int = 1,
    module_fqns: Sequence[Sequence[str]] | None = None,
) -> PipelinePlan:
    """The plan for a model whose layers are the children ``blocks`` of ``layout.blocks``, from the values of the keys
    under ``parallelism`` with names like these; ConfigError for what cannot be run."""
    name = csv or find_schedule(schedule)
    order = read_order(csv, degree) if csv else None

    def wrong(number: int) -> str | None:
        return _wrong_number(number, name, order, degree)

    first, last = first_stage_less_layers, last_stage_less_layers
    if module_fqns is not None:
        if layers_per_stage is not None:
            raise ConfigError(LAYERS_KEY, f"{MODULES_KEY} says already what each stage has; leave out one of the two")
        stages = check_stages(layout, blocks, module_fqns)
        if problem := wrong(len(stages)):
            raise ConfigError(MODULES_KEY, f"these are {len(stages)} stages, but {problem}")
    elif layers_per_stage is not None:
        layers = len(blocks) + first + last
        number = -(-layers // layers_per_stage)
        if problem := wrong(number):
            fitting = [
                str(n) for n in range(1, layers + 1) if len(blocks) >= -(-layers // n) and not wrong(-(-layers // n))
            ]
            remedy = f"; try {', '.join(fitting)}" if fitting else ""
            raise ConfigError(
                LAYERS_KEY,
                f"{layers_per_stage} makes {number} stages of {layers} layers, {first + last} of which stand for "
                f"embedding and head, but {problem}{remedy}",
            )
        remedy = f"raise it; embedding and head count as {first + last} layers of all"
        stages = split_stages(layout, blocks, number, first=first, last=last, key=LAYERS_KEY, remedy=remedy)
    elif order is not None:
        stages = split_stages(
            layout, blocks, _stages_in(order), first=first, last=last, key=FILE_KEY, remedy="use fewer"
        )
    else:
        number = degree * (SCHEDULES[name].stages_a_rank or 2)
        remedy = f"lower {DEGREE_KEY}"
        if degree <= len(blocks):
            remedy += f", or set {SCHEDULE_KEY} to 1F1B, which has one stage on each rank"
        stages = split_stages(layout, blocks, number, first=first, last=last, remedy=remedy)

    if order is not None:
        owner = {action.stage: rank for rank, steps in enumerate(order) for step in steps for action in step}
        placement = tuple(owner[stage] for stage in range(len(stages)))
    else:
        placement = place_stages(name, degree, len(stages))
    return PipelinePlan(degree, stages, placement, name, len(blocks), order)


def _stages_in(order: Order) -> int:
    return 1 + max(action.stage for steps in order for step in steps for action in step)


def _micro_batches_in(order: Order) -> int:
    return 1 + max(action.micro_batch for steps in order for step in steps for action in step)


def _wrong_number(number: int, schedule: str, order: Order | None, degree: int) -> str | None:
    """Why a pipeline cannot have ``number`` stages; None if it can."""
    if order is not None:
        return None if number == _stages_in(order) else f"{FILE_KEY} is for {_stages_in(order)}"
    takes = SCHEDULES[schedule].stages_a_rank
    if takes is None:
        return (
            None
            if number % degree == 0 and number > degree
            else f"{schedule} needs two, three or more on each of {degree} ranks"
        )
    return None if number == takes * degree else f"{schedule} needs {takes} on each of {degree} ranks"


def split_stages(
    layout: Layout,
    blocks: Sequence[str],
    number: int,
    *,
    first: int,
    last: int,
    key: str = DEGREE_KEY,
    remedy: str = "",
) -> tuple[tuple[str, ...], ...]:
    """The module names of each of ``number`` stages: the stem in the first, the head in the last, and blocks such that
    the largest stage is as small as can be, where the stem counts as ``first`` blocks and the head as ``last``; among
    such splits one that is even in blocks.

    ConfigError, on ``key`` and with ``remedy``, if there is no block for each.
    """
    if number > len(blocks):
        raise ConfigError(key, f"{number} stages need a layer each, but there are {len(blocks)}; {remedy}")
    counts = [1] * number
    weights = [1] * number
    weights[0] += first
    weights[-1] += last
    for _ in range(len(blocks) - number):
        smallest = min(range(number), key=lambda stage: (weights[stage], counts[stage]))
        counts[smallest] += 1
        weights[smallest] += 1
    names = iter(f"{layout.blocks}.{block}" for block in blocks)
    stages = [[next(names) for _ in range(count)] for count in counts]
    return tuple(
        (*(layout.stem if i == 0 else ()), *stage, *(layout.head if i == number - 1 else ()))
        for i, stage in enumerate(stages)
    )


def check_stages(layout: Layout, blocks: Sequence[str], stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """``stages`` as written by a user, if they hold every module once and in order; ConfigError otherwise."""
    expected = [*layout.stem, *(f"{layout.blocks}.{block}" for block in blocks), *layout.head]
    given = [name for stage in stages for name in stage]
    if empty := next((str(i) for i, stage in enumerate(stages) if not stage), None):
        raise ConfigError(MODULES_KEY, f"list {empty} (from 0) is empty; leave it out, or give the stage a module")
    if unknown := [name for name in given if name not in expected]:
        raise ConfigError(
            MODULES_KEY, f"the model has no {unknown[0]!r}; its modules are {_shortened(expected)}, each to stand once"
        )
    if repeated := [name for name, times in Counter(given).items() if times > 1]:
        raise ConfigError(MODULES_KEY, f"{repeated[0]} comes twice; leave it in one list")
    if missing := [name for name in expected if name not in given]:
        raise ConfigError(MODULES_KEY, f"{_shortened(missing)} missing; add to one of the lists")
    if wrong := next((pair for pair in zip(given, expected, strict=True) if pair[0] != pair[1]), None):
        raise ConfigError(
            MODULES_KEY, f"{wrong[0]} stands where {wrong[1]} must; list modules as data passes: {_shortened(expected)}"
        )
    return tuple(tuple(stage) for stage in stages)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else (*names[:3], "…", *names[-3:]))


def check_micro_batches(plan: PipelinePlan, number: int, readers: int | None = None) -> None:
    """ConfigError if the schedule cannot run ``number`` micro-batches. ``readers`` is given where it is a global batch
    for so many readers that makes this number, and not the local one."""
    key, unit, match = ROWS_KEY, SIZE_KEY, ", with a global batch to match"
    if readers is not None:
        key, unit, match = GLOBAL_KEY, f"{readers} readers × {SIZE_KEY}", ""
    if plan.order is not None:
        fixed = _micro_batches_in(plan.order)
        if number != fixed:
            raise ConfigError(
                key, f"makes {number} micro-batches, but {FILE_KEY} is for {fixed}; set it to {fixed} × {unit}{match}"
            )
        return
    family = SCHEDULES[plan.schedule]

    def fits(n: int) -> bool:
        return family.fits(plan.ranks, len(plan.stages), n)

    if not fits(number):
        fewer = next((n for n in range(number, 0, -1) if fits(n)), None)
        more = next(n for n in range(number, 2 * number + len(plan.stages)) if fits(n))
        near = f"{fewer} or {more}" if fewer else str(more)
        other = "GPipe" if family.stages_a_rank == 1 else "LoopedBFS"
        raise ConfigError(
            key,
            f"makes {number} micro-batches for {len(plan.stages)} stages on {plan.ranks} ranks, but {plan.schedule} "
            f"takes {family.needs}; set it to {near} × {unit}{match}, or "
            f"{SCHEDULE_KEY} to {other}, which takes any number",
        )


def describe(plan: PipelinePlan, number: int) -> str:
    """One sentence on a plan that runs ``number`` micro-batches: its shape, its bubble, and what would make that
    smaller."""
    idle = bubble(plan.order_for(number))
    found: list[tuple[float, str]] = []
    if plan.order is None and SCHEDULES[plan.schedule].fits(plan.ranks, len(plan.stages), 2 * number):
        found.append((bubble(plan.order_for(2 * number)), f"{2 * number} micro-batches"))
    others = []
    for name, family in SCHEDULES.items():
        stages = plan.ranks * (family.stages_a_rank or 2)
        if name != plan.schedule and stages <= plan.blocks and family.fits(plan.ranks, stages, number):
            others.append((bubble(order_of(name, plan.ranks, stages, number)), name))
    found += sorted(others)[:1]
    better = [f"{share:.1%} with {what}" for share, what in found if share < idle - 0.0005]
    return (
        f"Pipeline: {plan.schedule} runs {number} micro-batches through {len(plan.stages)} stages on "
        f"{plan.ranks} ranks, which wait {idle:.1%} of the time{'; ' if better else ''}{', '.join(better)}"
    )
