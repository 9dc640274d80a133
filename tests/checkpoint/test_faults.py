"""Disks that are full or read-only, and kills at everything that a save does to its files.

All of it, with true kills, a true small disk and more modes, is in ``scripts/prove_checkpoints.py faults``.
"""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.checkpoint.disk import NAMES, Some
from tests.checkpoint.faults import SMALL, failing_storage
from tests.checkpoint.runs import Run, said
from tests.checkpoint.scenes import SCENES, Scene, kills_everywhere
from tests.launch import run_ranks
from torchtitan.checkpoint import checkpointer
from torchtitan.distributed.world import World


@pytest.mark.parametrize(
    ("mode", "fault", "once", "last"),
    [
        ("disabled", "full", False, False),
        ("async", "full", True, False),
        ("async", "read-only", True, True),
    ],
)
def test_a_storage_that_fails_costs_one_save(tmp_path: Path, mode: str, fault: str, once: bool, last: bool) -> None:
    fail = partial(failing_storage, fault=fault, once=once, last=last, tried=Some(writes=60))
    (report,) = run_ranks(fail, 1, tmp_path, mode)
    assert not report.wrong
    assert report.tried > 30 and report.told > 20


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_whatever_a_killed_run_was_doing_it_goes_on(tmp_path: Path, scene: Scene) -> None:
    (report,) = run_ranks(kills_everywhere, 1, tmp_path, "async", scene, Some(kinds=NAMES))
    assert not report.wrong
    assert report.tried >= 10


def saves_beside_a_leftover(world: World, root: Path) -> tuple[list[int], list[str]]:
    (root / "step-7.partial").mkdir(parents=True)

    def free(folder: Path) -> int:
        return 0 if (folder / "step-7.partial").exists() else 1 << 40

    with mock.patch.object(checkpointer, "free_bytes", free), said() as lines:
        run = Run(root, world, shape=SMALL)
        run.step()
    return run.folders.steps(), lines


def test_what_a_killed_save_left_does_not_take_the_room_of_the_next(tmp_path: Path) -> None:
    assert run_ranks(saves_beside_a_leftover, 1, tmp_path) == [([1], [])]
