"""Muon on spread matrices, beside SGD and AdamW, against one process: all weights to 1e-5, the work divided, replicas
equal to the bit."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.equivalence.layouts import Layout, base_argv, ignore_labels, unequal_replicas, widen
from tests.launch import run_ranks
from tests.runs import whole_parameters
from torchtitan import trainer as trainer_module
from torchtitan.config import load_config
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.world import World
from torchtitan.optim import muon
from torchtitan.optim.whole import Task
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

# The vocabulary of 101 is divided by no degree, so embedding and head are spread unevenly.
MUON = (
    '--optimizer.groups=[{pattern = ["layers.*.w*.weight", "tok_embeddings.weight", "output.weight"], '
    'name = "Muon", lr = 0.02}, {pattern = "*ffn_norm.weight", name = "SGD"}]'
)
MATRICES = 4 * 7 + 2
TWO = [Layout({"tp": 2}), Layout({"pp": 2}), Layout({"dp": 2, "offloaded": True})]
FOUR = [
    Layout({"dp": 4}),
    Layout({"dp": 2, "tp": 2}),
    Layout({"rep": 2, "dp": 2}),
    Layout({"rep": 2, "tp": 2}),
    Layout({"cp": 2, "pp": 2}),
]


def local_shards(tasks: Sequence[Task]) -> None:
    """The classic fault: each rank makes its own part orthogonal."""
    for task in tasks:
        part = torch.empty_like(task.parameter)
        local_part(part).copy_(task.compute(local_part(task.direction())))
        task.update(part)


def run(
    world: World, argv: list[str], map_whole: Callable[[Sequence[Task]], None] | None = None
) -> tuple[dict[str, Tensor], list[str], int]:
    """The weights after three steps, those that ranks do not hold alike, and how many matrices this rank computed."""
    calls = []
    compute = muon.orthogonalize

    def counted(matrix: Tensor, **options: Any) -> Tensor:
        calls.append(matrix.shape)
        return compute(matrix, **options)

    job = resolve_job(load_config(argv), world.size)  # which tries the optimizer, and is not counted
    with mock.patch.object(muon, "orthogonalize", counted):
        if map_whole is None:
            trainer = Trainer(job, world)
        else:
            with mock.patch.object(trainer_module, "map_whole", map_whole):
                trainer = Trainer(job, world)
    named = trainer.runner.named_parameters
    widen(named)
    degrees = trainer.topology.degrees
    rows = trainer.state.global_batch_size
    for batches, _ in zip(trainer.loader, range(3), strict=False):
        batches = ignore_labels(batches, trainer.topology.reader_rank * -(-rows // degrees.readers), rows)
        (counted_labels,) = world.sum([sum(b.num_valid() for b in batches)])
        trainer.train_step(batches, counted_labels / degrees.copies)
    trainer.close()
    weights = {name: p.detach() for name, p in named}
    return whole_parameters(weights, world), unequal_replicas(weights, world), len(calls)


def run_layouts(
    world: World, base: list[str], layouts: Sequence[Layout]
) -> list[tuple[dict[str, Tensor], list[str], int]]:
    return [run(world, [*base, MUON, *layout.argv()]) for layout in layouts]


def sabotaged(world: World, base: list[str]) -> dict[str, Tensor]:
    return run(world, [*base, MUON, *Layout({"dp": 2}).argv()], local_shards)[0]


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(got) == set(expected)
    return max(float((got[name] - expected[name]).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("muon")
    return base_argv(folder)


@pytest.fixture(scope="module")
def one_process(base: list[str]) -> dict[str, Tensor]:
    (((weights, _, calls),),) = run_ranks(run_layouts, 1, base, [Layout({})])
    assert calls == 3 * MATRICES
    return weights


@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_layouts_give_the_weights_of_one_process(
    base: list[str], one_process: dict[str, Tensor], layouts: list[Layout]
) -> None:
    by_rank = run_ranks(run_layouts, layouts[0].ranks, base, layouts)
    wrong = []
    for number, layout in enumerate(layouts):
        weights, unequal, _ = by_rank[0][number]
        off = difference(weights, one_process)
        calls = [results[number][2] for results in by_rank]
        print(f"{layout.name:20s} {off:.1e}  matrices by rank: {calls}")
        wrong += [layout.name] if off > 1e-5 else []
        assert not unequal, f"{layout.name}: ranks hold unequal weights"
        # Each once on all ranks together, and no rank does more than its share.
        assert sum(calls) == 3 * MATRICES, layout.name
        stages = layout.keys.get("pp", 1)
        assert max(calls) <= 3 * (math.ceil(MATRICES / stages / (layout.ranks // stages)) + 1), layout.name
    assert not wrong


def test_the_comparison_sees_local_shards(base: list[str], one_process: dict[str, Tensor]) -> None:
    assert difference(run_ranks(sabotaged, 2, base)[0], one_process) > 1e-2
