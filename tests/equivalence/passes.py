"""Compiling and activation checkpointing against none of both, in one process and in layouts; whole tables of it are
printed by scripts/prove_speed.py."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.equivalence.layouts import Layout, Record, run
from torchtitan.distributed.compile import graphs_made
from torchtitan.distributed.world import World

_SECTION = "--activation_checkpoint"
MODES: dict[str, list[str]] = {
    "none": [],
    "full": [f"{_SECTION}.mode=full"],
    "every 2nd": [f"{_SECTION}.mode=selective"],
    "per op": [f"{_SECTION}.mode=selective", f"{_SECTION}.selective_ac_option=op"],
    "memory budget": [f"{_SECTION}.mode=memory_budget", f"{_SECTION}.memory_budget=0.3"],
}
LAYOUTS = [Layout({}), *(Layout({axis: 2}) for axis in ("tp", "pp", "cp", "dp"))]


@dataclass(frozen=True)
class Cell:
    """A mode of ``MODES``, compiled by ``backend`` or, where that is empty, not compiled; ``more`` words of its own."""

    mode: str = "none"
    backend: str = ""
    more: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        compiled = ["--compile.enable", f"--compile.backend={self.backend}"] if self.backend else []
        return [*MODES[self.mode], *compiled, *self.more]

    def __str__(self) -> str:
        return ", ".join([self.mode, *([self.backend] if self.backend else ["eager"]), *self.more])


CELLS = [Cell(mode, backend) for backend in ("", "inductor") for mode in MODES if backend or mode != "memory budget"]


@dataclass
class Passed:
    """What a run was, the graphs that it compiled and the seconds of processor that it took."""

    record: Record = field(default_factory=Record)
    graphs: int = 0
    seconds: float = 0.0


def run_cells(world: World, base: Sequence[str], layout: Layout, cells: Sequence[Cell]) -> list[Passed]:
    """Each cell in turn, in the same processes, none of which has compiled before."""
    passed = []
    for cell in cells:
        torch.compiler.reset()
        before, start = graphs_made(), time.process_time()
        record = run(world, [*base, *layout.argv(), *cell.argv()])
        passed.append(Passed(record or Record(), graphs_made() - before, time.process_time() - start))
    return passed


def equal_to_the_bit(got: Record, expected: Record) -> bool:
    same = all(torch.equal(got.gradients[name], value) for name, value in expected.gradients.items())
    return same and got.losses == expected.losses and got.norms == expected.norms
