"""A model that draws random numbers resumes to the bit: what a step draws follows from seed, step and rows alone."""

from pathlib import Path

import pytest
import torch

from tests.launch import run_ranks
from tests.runs import Outcome, run_job, tiny_argv
from torchtitan import trainer
from torchtitan.distributed.world import World

ARGV = ["--job.imports=tests.golden.parts", "--model.name=forgetful", "--checkpoint.enable"]
LAYOUTS = {
    "shard": [],
    "pipeline": ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=6"],
}


def through_and_resumed(world: World, folder: Path, layouts: dict[str, list[str]]) -> dict[str, list[Outcome]]:
    """For each layout six steps at once, and three and three; the layout "unseeded" as before steps were seeded."""
    outcomes = {}
    for name, layout in layouts.items():
        if name == "unseeded":
            trainer.seed_step = lambda *_: None
        argv = [*ARGV, *layout, "--lr_scheduler.total_steps=6"]
        runs = [("through", 6), ("halves", 3), ("halves", 6)]
        outcomes[name] = [
            run_job(world, tiny_argv(folder, *argv, f"--training.steps={steps}", run=f"{name}-{run}"))
            for run, steps in runs
        ]
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    layouts = {**LAYOUTS, "unseeded": LAYOUTS["shard"]}
    return run_ranks(through_and_resumed, 2, tmp_path_factory.mktemp("draws"), layouts)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_draws_what_it_would_have_drawn(outcomes: dict[str, list[Outcome]], layout: str) -> None:
    through, _, resumed = outcomes[layout]
    assert resumed.steps == [1, 2, 3, 4, 5, 6] and resumed.rows == through.rows[3:]
    assert resumed.losses == through.losses
    assert resumed.norms == through.norms
    for name, weight in through.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_without_the_seed_of_a_step_it_would_not(outcomes: dict[str, list[Outcome]]) -> None:
    through, _, resumed = outcomes["unseeded"]
    assert resumed.rows == through.rows[3:]
    assert resumed.losses[3:] != pytest.approx(through.losses[3:], abs=1e-4)
