"""Scales of float8 are those of whole tensors in every layout: the numbers of one process with the same micro-batches.

A scale of tensorwise activations is over the tokens that are computed at once, so one process takes the rows in the
batches of the layout. By rows, tokens scale alone, and powers of two change no digit: all rows at once will do. Blocks
of MXFP8 lie within every part.
"""

from pathlib import Path

import torch

from tests.equivalence.float8 import (
    GATHERED,
    MXFP8,
    PRECOMPUTED,
    RECIPES,
    compiled_gradients,
    emulated,
    first_step,
    run_each,
)
from tests.equivalence.layouts import Layout, Model, Record, base_argv
from tests.launch import run_ranks

MODEL = Model(layers=2)
TP, PP, DP, CP = (Layout({axis: 2}, MODEL) for axis in ("tp", "pp", "dp", "cp"))
TP4, TPDP = Layout({"tp": 4}, MODEL), Layout({"tp": 2, "dp": 2}, MODEL)
BATCHES = {PP.name: 8, DP.name: 2, TPDP.name: 2}
"""In how many pieces a layout computes the rows."""
TENSORWISE, ROWWISE, WEIGHTS_HP = (emulated(recipe) for recipe in RECIPES)
# By two ranks, and by four.
LAUNCHES = [
    [
        *((layout, TENSORWISE) for layout in (TP, PP, DP)),
        *((layout, ROWWISE) for layout in (TP, CP)),
        *((layout, WEIGHTS_HP) for layout in (TP, PP, CP)),
        *((layout, MXFP8) for layout in (TP, CP)),
        (DP, GATHERED),
        (TP, PRECOMPUTED),
    ],
    [(TP4, TENSORWISE), *((TPDP, words) for words in (WEIGHTS_HP, PRECOMPUTED))],
]


def reference(layout: Layout, words: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """In how many batches one process takes the rows, and in which words, to come to the same numbers."""
    by_rows = words in (ROWWISE, WEIGHTS_HP, MXFP8)
    return 1 if by_rows else BATCHES.get(layout.name, 1), words if by_rows else TENSORWISE


def run_alone(base: list[str], references: list[tuple[int, tuple[str, ...]]]) -> list[Record]:
    found: list[Record] = run_ranks(
        run_each, 1, base, [(Layout({}, MODEL, batches), words) for batches, words in references], timeout=280
    )[0]
    return found


def test_scales_are_those_of_whole_tensors(tmp_path: Path) -> None:
    base = base_argv(tmp_path, steps=1)
    alone = list(dict.fromkeys(reference(*case) for launch in LAUNCHES for case in launch))
    expected = dict(zip(alone, run_alone(base, alone), strict=True))
    for ranks, launch in zip((2, 4), LAUNCHES, strict=True):
        for case, got in zip(launch, run_ranks(run_each, ranks, base, launch, timeout=280)[0], strict=True):
            found = first_step(got, expected[reference(*case)])
            assert found["loss"] <= 1e-5 and found["middle"] <= 1e-5 and found["largest"] <= 0.1, (case, found)
            assert not got.unequal, case


def test_scales_of_parts_are_seen(tmp_path: Path) -> None:
    base = base_argv(tmp_path, steps=1)
    (whole,) = run_alone(base, [reference(TP, TENSORWISE)])
    (parts,) = run_ranks(run_each, 2, base, [(TP, TENSORWISE)], True, timeout=280)[0]
    found = first_step(parts, whole)
    assert found["loss"] > 1e-4 and found["middle"] > 1e-2, found


def test_computed_again_it_is_the_same(tmp_path: Path) -> None:
    op = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
    runs = [(TP, (*TENSORWISE, *more)) for more in ((), op, ("--activation_checkpoint.mode=full",))]
    plain, *others = run_ranks(run_each, TP.ranks, base_argv(tmp_path, steps=1), runs, timeout=280)[0]
    for other in others:
        assert other.losses == plain.losses and other.norms == plain.norms


def test_tensor_ranks_compile_it_to_one_graph() -> None:
    """By a compiler that leaves operations as they are: inductor fuses them, and float8 rounds what comes out."""
    for plain, compiled in run_ranks(compiled_gradients, 2, "aot_eager", timeout=200):
        assert set(plain) == {"ffn.w1.weight", "ffn.w2.weight", "ffn.w3.weight", "tokens"}
        assert all(torch.equal(compiled[name], value) for name, value in plain.items())
