"""Layouts against one process: initial weights to the bit; loss, norm and each parameter's gradient to 1e-5.

These are some of the layouts; ``scripts/prove_layouts.py`` compares all of them.
"""

from pathlib import Path

import pytest
import torch

from tests.equivalence.layouts import (
    FAULTS,
    Layout,
    Model,
    Record,
    all_layouts,
    base_argv,
    largest_difference,
    run_all,
    short_form,
)
from tests.launch import run_ranks

SHORT = short_form()
LAUNCHES = [
    layouts[first : first + 16]  # no more, so that the time limit is far away on a busy machine too
    for ranks in sorted({layout.ranks for layout in SHORT})
    for layouts in [[layout for layout in SHORT if layout.ranks == ranks]]
    for first in range(0, len(layouts), 16)
]
"""Layouts of a number of ranks, several in one launch."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("equivalence")
    return base_argv(folder)


@pytest.fixture(scope="module")
def references(base: list[str]) -> dict[Model, Record]:
    """Each model in one process, its whole batch at once."""
    models = list(dict.fromkeys(layout.model for layout in SHORT))
    (records,) = run_ranks(run_all, 1, base, [Layout({}, model) for model in models], timeout=280)
    return dict(zip(models, records, strict=True))


@pytest.mark.parametrize("layouts", LAUNCHES, ids=lambda layouts: f"{layouts[0].ranks} ranks from {layouts[0].name}")
def test_layouts_give_the_numbers_of_one_process(
    base: list[str], references: dict[Model, Record], layouts: list[Layout]
) -> None:
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


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_the_comparison_sees(base: list[str], references: dict[Model, Record], fault: str, name: str) -> None:
    """A classic fault of each parallelism; the tolerance must not hide it."""
    (layout,) = [layout for layout in all_layouts() if layout.name == name]
    records = run_ranks(run_all, layout.ranks, base, [layout], fault)[0]
    assert largest_difference(records[0], references[layout.model])["gradient"] > 100 * 1e-5


def test_the_whole_matrix_is_what_the_docs_say() -> None:
    layouts = all_layouts()
    assert len({layout.name for layout in layouts}) == len(layouts)
    assert {layout.ranks for layout in layouts} == {1, 2, 3, 4, 6, 8, 16}
