"""Runners: what an evaluation leaves behind. That they agree on numbers is compared in equivalence/."""

from pathlib import Path

import pytest
import torch

from tests.equivalence.layouts import Layout, base_argv
from tests.launch import run_ranks
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

LAYOUTS = [
    Layout({}),
    Layout({"dp": 2}),
    Layout({"dp": 2, "reshard": "never"}),
    Layout({"tp": 2}),
    Layout({"pp": 2}),
    Layout({"pp": 2, "schedule": "ZBVZeroBubble"}),
]


def losses(world: World, argv: list[str]) -> tuple[float, float, float]:
    """Of one batch: at the start, after its weights were halved, and by a trainer that knew no others."""
    job = resolve_job(load_config(argv), world.size)

    def evaluate(trainer: Trainer) -> float:
        return world.sum([float(trainer.runner.evaluate(batch, 100.0))])[0]

    def halve(trainer: Trainer) -> None:
        with torch.no_grad():
            for parameter in trainer.parameters:
                parameter.to_local().mul_(0.5)

    used, fresh = Trainer(job, world), Trainer(job, world)
    (batch,) = next(iter(used.loader))
    first = evaluate(used)
    halve(used)
    halve(fresh)
    found = first, evaluate(used), evaluate(fresh)
    assert all(parameter.grad is None for parameter in used.parameters)
    used.close()
    fresh.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_evaluation_keeps_no_weights_that_hide_later_ones(layout: Layout, tmp_path: Path) -> None:
    first, after, expected = run_ranks(losses, layout.ranks, [*base_argv(tmp_path), *layout.argv()])[0]
    assert after == expected
    assert abs(after - first) > 1e-3
