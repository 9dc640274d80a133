"""Reductions of host numbers, timeouts, and what happens to the others when a rank fails."""

import os
import time

import pytest

from tests.launch import RanksFailed, run_ranks
from torchtitan.distributed.world import World


def reductions(world: World) -> tuple[list[float], list[float], list[object]]:
    return world.sum([1.0, world.rank]), world.max([world.rank, -world.rank]), world.gather({"rank": world.rank})


def test_reductions() -> None:
    for result in run_ranks(reductions, 3):
        assert result == ([3.0, 3.0], [2.0, 0.0], [{"rank": 0}, {"rank": 1}, {"rank": 2}])


def wait_for_one_that_never_comes(world: World) -> float:
    world.set_timeout(1.0, [])
    start = time.monotonic()
    if world.rank == 1:
        time.sleep(60)
        return 0.0
    with pytest.raises(RuntimeError):
        world.barrier()
    os._exit(0 if time.monotonic() - start < 20 else 3)


def test_a_shortened_timeout_ends_a_collective() -> None:
    """Rank 0 gives up after a second, not after the half hour that gloo allows."""
    with pytest.raises((RanksFailed, FileNotFoundError)):  # rank 0 leaves no result, rank 1 then has no peer
        run_ranks(wait_for_one_that_never_comes, 2, timeout=30)


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
        run_ranks(hang, 2, timeout=5)
    assert time.monotonic() - start < 30
