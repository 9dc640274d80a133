"""The short form of the matrix in its launches, and what is asserted of each. The matrix itself: layouts.py."""

from collections.abc import Callable, Mapping, Sequence

import torch

from tests.equivalence.layouts import Layout, Model, Record, largest_difference, run_all, short_form
from tests.launch import run_ranks

LLAMA3 = Model().family
ROOMS: dict[str, Callable[[Layout], bool]] = {
    "test_families": lambda layout: layout.model.family != LLAMA3,
    "test_layouts": lambda layout: layout.model.family == LLAMA3 and "pp" not in layout.keys,
    "test_pipelines": lambda layout: layout.model.family == LLAMA3 and layout.keys.get("pp") == layout.ranks,
    "test_pipelines_combined": lambda layout: (
        layout.model.family == LLAMA3 and 1 < layout.keys.get("pp", 1) < layout.ranks
    ),
}
"""File → what it compares: a file is run by one process, and none may be waited for long."""


def launches(room: str) -> list[list[Layout]]:
    """Layouts of a number of ranks, several in one launch, of which each costs less than it would alone."""
    short = [layout for layout in short_form() if ROOMS[room](layout)]
    return [
        layouts[first : first + 16]  # no more, so that the time limit is far away on a busy machine too
        for ranks in sorted({layout.ranks for layout in short})
        for layouts in [[layout for layout in short if layout.ranks == ranks]]
        for first in range(0, len(layouts), 16)
    ]


def launch_name(layouts: Sequence[Layout]) -> str:
    return f"{layouts[0].ranks} ranks from {layouts[0].name}"


def assert_numbers_of_one_process(
    base: list[str], references: Mapping[Model, Record], layouts: Sequence[Layout]
) -> None:
    """Run them in one launch, and hold each against its model's reference."""
    records = run_ranks(run_all, layouts[0].ranks, base, layouts, timeout=280)[0]
    wrong = []
    for layout, got in zip(layouts, records, strict=True):
        expected = references[layout.model]
        for name, value in expected.initial.items():
            assert torch.equal(got.initial[name], value), f"{layout.name}: {name} starts from other weights"
        assert got.dtypes == {getattr(torch, layout.model.dtype)}, f"{layout.name} computes in {got.dtypes}"
        assert not got.unequal, f"{layout.name}: ranks hold unequal gradients"
        difference = largest_difference(got, expected)
        print(f"{layout.name:66s} " + "  ".join(f"{key} {value:.1e}" for key, value in difference.items()))
        wrong += [layout.name for key, value in difference.items() if value > layout.model.tolerance[key]]
    assert not wrong


def assert_seen(base: list[str], references: Mapping[Model, Record], fault: str, layout: Layout) -> None:
    """A classic fault; the tolerance must not hide it."""
    records = run_ranks(run_all, layout.ranks, base, [layout], fault)[0]
    assert largest_difference(records[0], references[layout.model])["gradient"] > 100 * 1e-5
