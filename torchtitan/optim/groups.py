"""Which optimizer updates which parameters, and at which rate: ``[optimizer]`` and ``[[optimizer.groups]]`` by name.

How a parameter is updated is in the optimizers' own files, the rate over time in ``schedules.py``.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan.errors import ConfigError, one_line
from torchtitan.log import logger
from torchtitan.optim.blocks import kept_in_blocks
from torchtitan.optim.optimizers import OPTIMIZERS, Groups, Takes
from torchtitan.optim.parts import LocalOptimizer, Parts
from torchtitan.optim.whole import MapWhole, WholeMatrixOptimizer, map_here


@dataclass(frozen=True)
class Group:
    """The parameters that one of ``patterns`` matches, all if None, and who updates them.

    ``key`` is where the group stands in the configuration. ``excluded`` are patterns of the parameters without weight
    decay. ``builder`` has its options, those of ``[optimizer]`` among them where the optimizer is the same.
    """

    key: str
    patterns: Sequence[str] | None
    optimizer: str
    builder: partial[Optimizer]
    lr: float
    excluded: Sequence[str]

    @property
    def compiled(self) -> bool:
        return self.builder.keywords.get("implementation") == "compiled"

    @property
    def block_size(self) -> int | None:
        """How many numbers along a parameter's last dimension its states keep together, if they do."""
        in_blocks = getattr(OPTIMIZERS.get(self.optimizer), "in_blocks", False)
        return self.builder.keywords["block_size"] if in_blocks else None

    def matches(self, name: str) -> bool:
        return self.patterns is None or _matches(name, self.patterns)

    def settings(self, parameters: Iterable[tuple[str, Tensor]]) -> Groups:
        """What torch takes: the parameters that decay, and those that do not."""
        decayed: list[Tensor] = []
        excluded: list[Tensor] = []
        for name, parameter in parameters:
            (excluded if _matches(name, self.excluded) else decayed).append(parameter)
        decay = {name: value for name, value in self.builder.keywords.items() if name == "weight_decay"}
        groups: Groups = [
            {"params": decayed, "lr": self.lr, **decay},
            {"params": excluded, "lr": self.lr, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def shares_with(self, other: Group) -> bool:
        """Whether one optimizer can do both: rate and decay are all that differs."""

        def rest(group: Group) -> dict[str, Any]:
            return {name: value for name, value in group.builder.keywords.items() if name != "weight_decay"}

        return self.optimizer == other.optimizer and rest(self) == rest(other)


class OptimizerPlan:
    """Groups by name: a parameter belongs to the first of ``groups`` that matches it. The last one takes the rest."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups

    def group_of(self, name: str) -> Group:
        return next(group for group in self.groups if group.matches(name))

    def optimizers(self, names: Iterable[str]) -> dict[str, str]:
        """Parameter → name of the optimizer that updates it."""
        return {name: self.group_of(name).optimizer for name in names}

    def blocks(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, str]]:
        """Of the parameters of ``shapes`` whose states are kept in blocks: the block, and the key that says so."""
        found = {}
        for name, shape in shapes.items():
            group = self.group_of(name)
            if group.block_size is not None and kept_in_blocks(shape, group.block_size):
                found[name] = group.block_size, f"{group.key}.block_size"
        return found

    def build(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        map_whole: MapWhole = map_here,
        parts: Parts = Parts(),  # noqa: B008, nobody changes it
    ) -> Optimizer:
        """One optimizer over ``named_parameters``, which may be any part of the model. ``map_whole`` goes to those that
        need whole matrices, ``parts`` to those that compute on what a process holds."""
        members: dict[str, list[tuple[str, Tensor]]] = {group.key: [] for group in self.groups}
        for name, parameter in named_parameters:
            members[self.group_of(name).key].append((name, parameter))
        built: list[Optimizer] = []
        waiting = [group for group in self.groups if members[group.key]]
        while waiting:
            first = waiting[0]
            together = [group for group in waiting if group.shares_with(first)]
            waiting = [group for group in waiting if not group.shares_with(first)]
            built.append(first.builder([entry for group in together for entry in group.settings(members[group.key])]))
        for optimizer in built:
            if isinstance(optimizer, WholeMatrixOptimizer):
                optimizer.map_whole = map_whole
            elif isinstance(optimizer, LocalOptimizer):
                optimizer.parts = parts
        return built[0] if len(built) == 1 else Together(built)


class Together(Optimizer):
    """Several optimizers, each with parameters of its own, as one: their groups are its groups, and so are states."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def plan_optimizer(
    name: str,
    options: Mapping[str, Any],
    *,
    lr: float,
    weight_decay_exclude: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
) -> OptimizerPlan:
    """The plan of ``[optimizer]`` and its ``groups``; ConfigError, on the group's key, for what its optimizer does not
    take."""
    planned = []
    for number, given in enumerate(groups):
        key = f"optimizer.groups[{number}]"
        own = {option: value for option, value in given.items() if option not in ("pattern", "lr", "name")}
        optimizer = given.get("name", name)
        inherited = options if optimizer == name else {}
        patterns = given["pattern"]
        planned.append(
            Group(
                key=key,
                patterns=[patterns] if isinstance(patterns, str) else patterns,
                optimizer=optimizer,
                builder=OPTIMIZERS.bind(optimizer, {**inherited, **own}, key=key),
                lr=given.get("lr", lr),
                excluded=[] if "weight_decay" in own else weight_decay_exclude,
            )
        )
    builder = OPTIMIZERS.bind(name, options, key="optimizer")
    return OptimizerPlan([*planned, Group("optimizer", None, name, builder, lr, weight_decay_exclude)])


def check_plan(
    plan: OptimizerPlan, shapes: Mapping[str, Sequence[int]], tied: Mapping[str, str] = MappingProxyType({})
) -> None:
    """ConfigError for a pattern that takes no parameter of the model, or for an optimizer that does not take what it
    gets, or keeps what a checkpoint cannot.

    ``shapes`` are those of the model's parameters by name; of ``tied`` ones, second name to first, by the first. Every
    optimizer is built once, on stand-ins of one element, and makes a step.
    """
    *by_pattern, rest = plan.groups
    owner_of = {name: plan.group_of(name) for name in shapes}
    _check_exist("optimizer.weight_decay_exclude", rest.excluded, shapes, tied)
    for group in by_pattern:
        _check_exist(f"{group.key}.pattern", group.patterns or (), shapes, tied)
        for pattern in group.patterns or ():
            owners = {name: owner_of[name].key for name in fnmatch.filter(shapes, pattern)}
            if group.key not in owners.values():
                name, owner = next(iter(owners.items()))
                raise ConfigError(
                    f"{group.key}.pattern",
                    f"all that {pattern!r} matches, such as {name}, belongs to {owner} before it; "
                    "the first group that matches takes a parameter, so put the narrower one first",
                )
    for group in plan.groups:
        members = {name: shape for name, shape in shapes.items() if owner_of[name] is group}
        if members:
            _check_shapes(group, members)
            _check_blocks(group, members)
            _try(group, members)
        elif group is rest:
            logger.warning("every parameter belongs to one of optimizer.groups: [optimizer] itself updates none")


def _check_shapes(group: Group, shapes: Mapping[str, Sequence[int]]) -> None:
    takes: Takes | None = getattr(OPTIMIZERS.get(group.optimizer), "takes", None)
    for name, shape in shapes.items():
        if takes is None or takes.fits(shape):
            continue
        problem = f"{group.optimizer} updates {takes.what} only, and {name} has the shape {list(shape)}"
        if group.patterns is None:
            raise ConfigError(
                "optimizer.name",
                f'{problem}; put such into a group with another, as [[optimizer.groups]] with pattern = "*norm.weight" '
                'and name = "AdamW" does for norms (embedding and head usually do better with that too)',
            )
        raise ConfigError(f"{group.key}.pattern", f"{problem}; narrow it, as layers.*.w*.weight does")


def _check_blocks(group: Group, shapes: Mapping[str, Sequence[int]]) -> None:
    block = group.block_size
    if block is None:
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{group.key}.name", f"{group.optimizer} needs the package torchao, which is not here; pip install torchao"
        )
    if not any(kept_in_blocks(shape, block) for shape in shapes.values()):
        name, shape = max(shapes.items(), key=lambda item: math.prod(item[1]))
        raise ConfigError(
            f"{group.key}.block_size",
            f"of no parameter would {group.optimizer} keep less: {block} divides the last dimension of none that has "
            f"4,096 numbers, as {name} {list(shape)}; lower it, or take an optimizer that keeps float32",
        )


def _try(group: Group, shapes: Mapping[str, Sequence[int]]) -> None:
    stand_ins = [(name, torch.nn.Parameter(torch.zeros([1] * len(shape)))) for name, shape in shapes.items()]
    does = "be built"
    try:
        with _no_graph():
            optimizer = group.builder(group.settings(stand_ins))
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"what builds it must return a torch.optim.Optimizer, not {optimizer!r}")
        for _, stand_in in stand_ins:
            stand_in.grad = torch.zeros_like(stand_in)
        does = "make a step"
        _step(optimizer)
    except ConfigError:
        raise
    except Exception as error:  # whatever somebody's own optimizer makes of its options
        raise ConfigError(f"{group.key}.name", f"{group.optimizer} cannot {does}: {one_line(error)}") from error
    for _, stand_in in stand_ins:
        for name, value in optimizer.state[stand_in].items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{group.key}.name",
                    f"{group.optimizer} keeps {name!r} of a parameter as {type(value).__name__}; only tensors can be "
                    "saved, so keep one",
                )


@contextlib.contextmanager
def _no_graph() -> Iterator[None]:
    """An optimizer built herein does without torch's compiler, which keeps groups out of its graphs and takes seconds
    to import: a trial has no graph, and whoever only checks a configuration never needs one."""
    kept = Optimizer.add_param_group
    Optimizer.add_param_group = inspect.unwrap(kept)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = kept  # type: ignore[method-assign]


def _step(optimizer: Optimizer) -> None:
    """Let it make a step; torch's own without what imports the compiler, for the same reason."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        optimizer.step()
        return
    with torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)):
        inspect.unwrap(type(optimizer).step)(optimizer)


def _check_exist(key: str, patterns: Sequence[str], names: Iterable[str], tied: Mapping[str, str]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            if second := fnmatch.filter(tied, pattern):
                raise ConfigError(key, f"{second[0]} is tied to {tied[second[0]]}; name that")
            raise ConfigError(
                key,
                f"no parameter matches {pattern!r}; "
                "names look like layers.0.attention.wq.weight, so try '*norm.weight'",
            )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
