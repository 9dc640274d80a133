"""Reductions of host numbers, timeouts, and what happens to the others when a rank fails."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.launch import RanksFailed, run_ranks
from torchtitan.distributed.world import World, seed_step


def reductions(world: World) -> tuple[list[float], list[float], list[object]]:
    return world.sum([1.0, world.rank]), world.max([world.rank, -world.rank]), world.gather({"rank": world.rank})


def test_reductions() -> None:
    for result in run_ranks(reductions, 3):
        assert result == ([3.0, 3.0], [2.0, 0.0], [{"rank": 0}, {"rank": 1}, {"rank": 2}])


def wait_for_one_that_never_comes(world: World, told: Path) -> None:
    if world.rank == 1:
        while not told.exists():
            time.sleep(0.05)
        os._exit(1)
    world.set_timeout(1.0, [])
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        world.barrier()
    told.with_suffix(".new").write_text(str(time.monotonic() - start))
    told.with_suffix(".new").rename(told)
    os._exit(1)


def test_a_shortened_timeout_ends_a_collective(tmp_path: Path) -> None:
    """Rank 0 gives up after a second, not after the half hour that gloo allows."""
    told = tmp_path / "seconds"
    with pytest.raises(RanksFailed, match="ended with 1"):  # nothing can be awaited together from then on
        run_ranks(wait_for_one_that_never_comes, 2, told, timeout=60)
    assert 0.9 < float(told.read_text()) < 20


def fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank 1 is broken")
    world.barrier()


def test_the_first_error_is_the_one_that_is_shown() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 is broken"):
        run_ranks(fail_on_one, 3)
    assert time.monotonic() - start < 60


def hang(world: World) -> None:
    time.sleep(600)


def test_the_time_limit_is_hard() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="still running at the time limit"):
        run_ranks(hang, 2, timeout=2)
    assert time.monotonic() - start < 30


def test_what_a_step_draws_depends_on_seed_step_and_reader() -> None:
    def draw(seed: int, step: int, reader: int) -> float:
        seed_step(seed, step, reader, torch.device("cpu"))
        return torch.rand(()).item()

    before = torch.get_rng_state()
    places = [(seed, step, reader) for seed in (0, 1, 2**62) for step in range(1, 30) for reader in range(30)]
    drawn = [draw(*place) for place in places]
    torch.set_rng_state(before)
    assert len(set(drawn)) > 0.999 * len(places)  # float32 has 2**24 values in [0, 1)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.03)
    assert [draw(*place) for place in places[::100]] == drawn[::100]
    torch.set_rng_state(before)
