"""Saving beside training: what reaches the files, what a save may cost, and how its failures are told."""

import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.checkpoint.faults import a_slow_storage
from tests.checkpoint.runs import Run, said, storage_that
from tests.launch import children_of, run_ranks
from torchtitan.checkpoint import background, checkpointer
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError

MODES = ["async", "async_with_pinned_mem"]


def what_changes_after_save_returns_stays_out(world: World, folder: Path, mode: str) -> list[tuple[int, float]]:
    run = Run(folder, world, async_mode=mode)
    for _ in range(3):
        run.step()
        run.spoil()
        run.checkpointer.finish()
    run.close()
    return [(step, Reader(run.folders.path(step)).tensor("a").unique().item()) for step in run.folders.steps()]


@pytest.mark.parametrize("mode", MODES)
def test_what_changes_after_save_returns_stays_out(tmp_path: Path, mode: str) -> None:
    for found in run_ranks(what_changes_after_save_returns_stays_out, 2, tmp_path, mode):
        assert found == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_slow_storage_holds_nobody_up(tmp_path: Path) -> None:
    for seconds, lines, steps in run_ranks(a_slow_storage, 2, tmp_path):
        assert seconds < 1.5
        assert [line for line in lines if "step 2 is not saved: step 1 is still being written" in line]
        assert steps == [1, 11]


def failures(world: World, folder: Path) -> dict[str, str]:
    """What becomes of errors of the background that are no failure of storage, and of waits that are too long."""
    told = {}

    def error_of(run: Run, steps: int) -> str:
        try:
            for _ in range(steps):
                run.step()
                time.sleep(0.3)
            run.checkpointer.finish()
        except CheckpointError as error:
            return str(error)
        return "none"

    def wrong(name: str) -> None:
        if world.rank == 1:
            raise ZeroDivisionError("a mistake")

    run = Run(folder / "mistake", world, async_mode="async")
    with storage_that(wrong):
        told["mistake"] = error_of(run, 4)
    told["after it"] = str(run.state.step)

    before = set(children_of(os.getpid()))
    run = Run(folder / "killed", world, async_mode="async_with_pinned_mem")
    (writer,) = set(children_of(os.getpid())) - before
    if world.rank == 1:
        os.kill(writer, signal.SIGKILL)
    told["killed"] = error_of(run, 1)
    run.close()

    run = Run(folder / "stuck", world, async_mode="async", save_timeout_seconds=1)
    stuck = threading.Event()
    with storage_that(lambda name: stuck.wait(20) and None):
        try:
            run.step(last=True)
        except CheckpointError as error:
            told["stuck"] = str(error)
        stuck.set()

    run = Run(folder / "room", world, async_mode="async")
    with mock.patch.object(checkpointer, "free_bytes", lambda folder: 1 << 20), said() as lines:
        run.step()
    told["room"] = lines[0] if lines else ""
    run.step()
    run.checkpointer.finish()
    told["room after"] = str(run.folders.steps())

    with mock.patch.object(checkpointer, "free_bytes", lambda folder: 1 << 20):
        try:
            run.step(last=True)
        except CheckpointError as error:
            told["no room for the last"] = str(error)
    return told


def test_failures_are_told_by_all_ranks_at_the_next_step(tmp_path: Path) -> None:
    for told in run_ranks(failures, 2, tmp_path):
        assert told["mistake"].endswith(
            "step 1 could not be saved in " + str(tmp_path / "mistake") + ": ZeroDivisionError: a mistake"
        )
        assert told["after it"] == "2"
        assert "step 1 could not be saved" in told["killed"] and "killed by SIGKILL" in told["killed"]
        assert "step 1 is still being written" in told["stuck"] and "save_timeout_seconds=1" in told["stuck"]
        assert "step 1 could not be saved" in told["room"] and "1.0 MiB left on the disk" in told["room"]
        assert told["room after"] == "[2]"
        assert "step 3 could not be saved" in told["no room for the last"]


def memory_of(world: World, folder: Path, mode: str) -> list[int]:
    """Anonymous memory in kB after each save."""
    run = Run(folder, world, async_mode=mode, keep_latest_k=2)
    after = []
    for _ in range(20):
        run.step()
        run.checkpointer.finish()
        status = Path("/proc/self/status").read_text()
        after.append(int(status.partition("RssAnon:")[2].split()[0]))
    run.close()
    return after


@pytest.mark.parametrize("mode", MODES)
def test_memory_stays_flat(tmp_path: Path, mode: str) -> None:
    (after,) = run_ranks(memory_of, 1, tmp_path, mode)
    assert max(after[3:]) < 1.05 * min(after[3:])


def test_a_plan_lays_tensors_apart() -> None:
    from torchtitan.checkpoint.dcp.writer import local_plan

    state = {"a": torch.arange(5, dtype=torch.bfloat16), "b": torch.tensor(2.0), "c": torch.arange(6).view(2, 3)}
    state |= {"d": torch.empty(0, 3), "e": torch.empty(2, 0)}
    plan, resolve = local_plan(state)
    memory = os.memfd_create("test")
    layout = background.Layout.of(plan)
    os.ftruncate(memory, layout.size)
    ours, theirs = layout.tensors(memory), layout.tensors(memory)
    for item in plan.items:
        ours[item.index].copy_(resolve(item))
    for item in plan.items:
        copy = theirs[item.index]
        assert torch.equal(copy, state[item.index.fqn])
        assert copy.untyped_storage().size() == copy.nbytes
    os.close(memory)
