"""In what two steps differ: tensors, one pair in memory at a time, and the numbers of their runs.

What a single step holds is in ``inventory.py``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.inspect.inventory import Step, dtype_name
from torchtitan.checkpoint.titan import TitanStep, holds_run
from torchtitan.errors import CheckpointError

_BLOCK = 1 << 20  # elements that are compared in double precision at a time


@dataclass
class Difference:
    """Of two tensors of one name. ``differing`` of ``elements`` differ, ``outside`` of them by more than is tolerated;
    ``largest`` is the largest difference, ``magnitude`` the largest finite value; ``nans`` are NaN in both and equal,
    ``nans_in_one`` in one of them. ``same_bits`` says more than that none differs, and then the magnitude is not known.
    """

    name: str
    shapes: tuple[list[int], list[int]]
    dtypes: tuple[str, str]
    elements: int = 0
    differing: int = 0
    outside: int = 0
    largest: float = 0.0
    magnitude: float | None = None
    nans: int = 0
    nans_in_one: int = 0
    same_bits: bool = False

    @property
    def comparable(self) -> bool:
        return self.shapes[0] == self.shapes[1]

    @property
    def relative(self) -> float:
        if not self.largest:
            return 0.0
        return self.largest / self.magnitude if self.magnitude else math.inf


@dataclass
class Comparison:
    """``only`` are names in the first and in the second alone; ``numbers`` those that differ, None where there is none.
    ``tolerant`` says that a tolerance was given."""

    only: tuple[list[str], list[str]]
    tensors: list[Difference] = field(default_factory=list)
    numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tolerant: bool = False

    def differs(self, difference: Difference) -> bool:
        """Dtypes alone do not count where a tolerance was given."""
        other_dtype = difference.dtypes[0] != difference.dtypes[1] and not self.tolerant
        return not difference.comparable or other_dtype or difference.outside > 0

    @property
    def equal(self) -> bool:
        return not any(self.only) and not self.numbers and not any(map(self.differs, self.tensors))


def compare(
    first: Step,
    second: Step,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    model_only: bool = False,
    seen: Callable[[str], object] = lambda name: None,
) -> Comparison:
    """A difference is tolerated up to ``atol`` + ``rtol`` · |value in the second|; ``seen`` is told each name.

    CheckpointError where one of them cannot be read.
    """
    one, two = _reader(first), _reader(second)
    names = [dict.fromkeys(sorted(reader.weights if model_only else reader.tensors)) for reader in (one, two)]
    only = [name for name in names[0] if name not in names[1]], [name for name in names[1] if name not in names[0]]
    result = Comparison(only, tolerant=rtol > 0 or atol > 0)
    for name in names[0]:
        if name in names[1]:
            seen(name)
            result.tensors.append(_difference(name, one, two, rtol, atol))
    if not model_only:
        result.numbers = _differing(numbers(first), numbers(second), same_kind=first.state == second.state)
    return result


def numbers(step: Step) -> dict[str, Any]:
    """What a step says beside its tensors, in one table: of the manifest, else of TorchTitan's entries."""
    if step.manifest is not None:
        return dict(flattened(step.manifest.state))
    reader = _reader(step)
    if not holds_run(reader):
        return {}
    found = {"train_state.step": (titan := TitanStep(reader)).step}
    if titan.tokens_seen is not None:
        found["train_state.tokens_seen"] = titan.tokens_seen
    return found | reader.read_values(sorted(name for name in reader.values if name.startswith("lr_scheduler.")))


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with dots, and their values."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _reader(step: Step) -> Reader:
    if step.reader is None:
        raise CheckpointError(f"{step.folder} cannot be compared: {step.note}")
    return step.reader


def _differing(one: Mapping[str, Any], two: Mapping[str, Any], *, same_kind: bool) -> dict[str, tuple[Any, Any]]:
    """Two programs say different things; of those, what both say is compared."""
    names = sorted({*one, *two} if same_kind else {*one} & {*two})
    return {name: (one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)}


def _difference(name: str, one: Reader, two: Reader, rtol: float, atol: float) -> Difference:
    entries = one.tensors[name], two.tensors[name]
    shapes = list(entries[0].size), list(entries[1].size)
    found = Difference(name, shapes, (dtype_name(entries[0].properties.dtype), dtype_name(entries[1].properties.dtype)))
    if found.comparable:
        _compare_values(found, one.tensor(name).reshape(-1), two.tensor(name).reshape(-1), rtol, atol)
    return found


def _compare_values(found: Difference, one: Tensor, two: Tensor, rtol: float, atol: float) -> None:
    found.elements = one.numel()
    found.same_bits = one.dtype == two.dtype and one.view(torch.uint8).equal(two.view(torch.uint8))
    if found.same_bits:  # most often, and quick to see
        blocks = one.split(_BLOCK) if one.dtype.is_floating_point else ()
        found.nans = sum(int(block.float().isnan().sum()) for block in blocks)
    if found.same_bits or not found.elements:
        return
    for a, b in zip(one.split(_BLOCK), two.split(_BLOCK), strict=True):
        x, y = (part.to(torch.complex128 if part.is_complex() else torch.float64) for part in (a, b))
        both, either = x.isnan() & y.isnan(), x.isnan() | y.isnan()
        exact = a == b if a.dtype == b.dtype else x == y  # doubles do not hold every large integer
        unequal = ~(exact | both)
        gap = torch.where(unequal & ~either, (x - y).abs(), 0.0)
        room = atol + rtol * y.abs()
        beyond = either | ~gap.isfinite() | (gap > room) | ((gap == 0) & (room == 0))
        found.differing += int(unequal.sum())
        found.outside += int((unequal & beyond).sum())
        found.nans += int(both.sum())
        found.nans_in_one += int((either & ~both).sum())
        found.largest = max(found.largest, float(gap.max()))
        for value in (x.abs(), y.abs()):
            found.magnitude = max(found.magnitude or 0.0, float(torch.where(value.isfinite(), value, 0.0).max()))
