"""A run that is asked to stop at an awkward moment, on one rank only: all stop at one step, which is saved and goes on.

Signals to commands and whole jobs are in ``tests/cli``.
"""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.runs import Outcome, run_job, tiny_argv
from torchtitan.checkpoint import background
from torchtitan.distributed.world import World
from torchtitan.resilience import guard
from torchtitan.trainer import Trainer

STEPS = 6
STOPS_AFTER = {"two signals in the first step": 1, "a signal while saving": 4, "time is up": 3}
ARGV = [f"--training.steps={STEPS}", "--checkpoint.enable", "--checkpoint.interval=4", "--job.max_duration_minutes=60"]


def stopped_and_gone_on(world: World, folder: Path) -> dict[str, Any]:
    """The run that goes through and, for each moment, how often it wrote a step, how it stopped and how it went on."""
    moment, writes, hours_ahead = "", 0, 0
    gradients, write_share = Trainer.gradients, background.write_share

    def in_step(trainer: Trainer, *args: Any) -> Any:
        nonlocal hours_ahead
        if moment == "two signals in the first step" and trainer.state.step == 0:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        if moment == "time is up" and trainer.state.step == 2:
            hours_ahead = 2
        return gradients(trainer, *args)

    def in_save(*args: Any) -> Any:
        nonlocal writes
        writes += 1
        if moment == "a signal while saving":
            os.kill(os.getpid(), signal.SIGTERM)
        return write_share(*args)

    Trainer.gradients, background.write_share = in_step, in_save  # type: ignore[method-assign]
    guard.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=lambda: time.monotonic() + 3600 * hours_ahead, perf_counter=time.perf_counter
    )
    through = run_job(world, tiny_argv(folder, *ARGV, run="through"))
    outcomes: dict[str, Any] = {"through": through}
    for name in STOPS_AFTER:
        moment, writes = name if world.rank == 1 else "", 0
        stopped = run_job(world, tiny_argv(folder, *ARGV, run=name))
        written, moment, hours_ahead = writes, "", 0
        outcomes[name] = written, stopped, run_job(world, tiny_argv(folder, *ARGV, run=name))
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(stopped_and_gone_on, 2, tmp_path_factory.mktemp("stopping"))[0]


@pytest.mark.parametrize("moment", STOPS_AFTER)
def test_it_stops_after_the_step_saves_once_and_goes_on(outcomes: dict[str, Any], moment: str) -> None:
    through: Outcome = outcomes["through"]
    writes, stopped, resumed = outcomes[moment]
    last = STOPS_AFTER[moment]
    assert not stopped.finished and writes == 1
    assert stopped.losses == through.losses[:last]
    assert resumed.finished and resumed.steps == list(range(1, STEPS + 1))
    assert resumed.rows == through.rows[last:]
    assert resumed.losses == through.losses
