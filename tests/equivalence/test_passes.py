"""Compiling and activation checkpointing change no number: in one process and in layouts, against the plain run there.

The compiler here is one that leaves operations as they are, so that numbers are equal to the bit; what inductor makes
of them is compared by scripts/prove_speed.py, and for one process here.
"""

from pathlib import Path

import pytest

from tests.equivalence.layouts import Layout, Model, base_argv, largest_difference
from tests.equivalence.passes import Cell, equal_to_the_bit, run_cells
from tests.launch import run_ranks

_FORCED = "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=attention.wq"
EAGER = [Cell("full"), Cell("every 2nd"), Cell("per op"), Cell("per op", more=(_FORCED,))]
EAGER += [Cell("full", more=("--activation_checkpoint.early_stop", "--activation_checkpoint.no_preserve_rng_state"))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return base_argv(tmp_path_factory.mktemp("passes"))


@pytest.mark.parametrize(
    ("layout", "cells"),
    [
        (Layout({}), [*EAGER, Cell("per op", "aot_eager")]),
        (Layout({}, Model("gpt2", packing="documents")), EAGER[2:3]),
        (Layout({}, Model(dtype="bfloat16")), EAGER[2:3]),
        (Layout({"dp": 2}), EAGER[:1]),
        (Layout({"cp": 2}), EAGER[2:3]),
        (Layout({"cp": 2, "method": "ulysses"}, Model(packing="documents")), EAGER[:2]),
        (Layout({"pp": 2}), EAGER[1:3]),
        (Layout({"tp": 2}), [*EAGER[:3], Cell("full", "aot_eager")]),
        (Layout({"pp": 2, "schedule": "ZBVZeroBubble"}), EAGER[:2]),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else None,
)
def test_numbers_are_those_of_plain_passes(base: list[str], layout: Layout, cells: list[Cell]) -> None:
    plain, *found = run_ranks(run_cells, layout.ranks, base, layout, [Cell(), *cells], timeout=280)[0]
    for cell, got in zip(cells, found, strict=True):
        assert equal_to_the_bit(got.record, plain.record), f"{cell}: {largest_difference(got.record, plain.record)}"
        assert not got.record.unequal, cell
        # A graph for training and one for validation, of the blocks and of the loss, which a stage may lack.
        assert got.graphs <= 4 and (got.graphs >= 2) == bool(cell.backend), (cell, got.graphs)


def test_what_inductor_makes_is_equal_within_rounding(base: list[str]) -> None:
    cells = [Cell(), Cell("memory budget", "inductor")]
    plain, got = run_ranks(run_cells, 1, base, Layout({}, Model(layers=2)), cells, timeout=280)[0]
    difference = largest_difference(got.record, plain.record)
    assert all(value <= 1e-5 for value in difference.values()), difference


def test_a_wrong_pass_is_seen(base: list[str], tmp_path: Path) -> None:
    other, plain = (
        run_ranks(run_cells, 1, base, Layout({}), [cell])[0][0].record
        for cell in (Cell(more=("--model.args.norm_eps=1e-4",)), Cell())
    )
    assert not equal_to_the_bit(other, plain)
