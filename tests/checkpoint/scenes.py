"""Runs that die at each thing they do to their files in turn, and what the next start makes of what is left.

Kills at random of the real trainer are in ``kills.py``.
"""

import logging
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from upath import UPath

from tests.checkpoint.disk import ALL, Disk, Fault, Killed, Some, dead, killed, nothing, watched
from tests.checkpoint.faults import KEPT, SMALL, Report, flip, title, wrong_in
from tests.checkpoint.runs import Run, said
from torchtitan.checkpoint.manifest import MANIFEST, Manifest, damage
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError


@dataclass(frozen=True)
class Scene:
    """What lies there before, how the run is told to go on, and up to which step; the ``oldest`` step from which it may
    go on. A ``fresh`` one does not look what lies there, but for the starts after a kill."""

    name: str
    prepare: Callable[[Path, World], None]
    last: int
    oldest: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False


def _saved(count: int, root: Path, world: World) -> None:
    root.mkdir(parents=True)
    run = Run(root, world, shape=SMALL, keep_latest_k=0)
    for _ in range(count):
        run.step()


def _damaged(root: Path, world: World) -> None:
    _saved(3, root, world)
    flip(root / "step-3" / "__0_0.distcp", 0.5)


def _foreign(root: Path, world: World) -> None:
    _saved(3, root, world)
    (root / "step-3" / MANIFEST).unlink()


def _left_over(root: Path, world: World) -> None:
    _saved(4, root, world)
    (root / "step-4").rename(root / "step-4.partial")
    (root / "step-4.partial" / MANIFEST).unlink()
    (root / "step-1").rename(root / "step-1.removing")
    (root / "step-3").rename(root / "step-3.replaced")


SCENES = (
    Scene("first saves, older ones removed", partial(_saved, 0), last=4, oldest=0),
    Scene("a damaged step is passed over", _damaged, last=4, oldest=2),
    Scene("steps are replaced", partial(_saved, 3), last=3, oldest=2, keys={"keep_latest_k": 0}, fresh=True),
    Scene("another program's step makes room", _foreign, last=4, oldest=2),
    Scene("leftovers of three kills", _left_over, last=4, oldest=3),
    Scene("going back", partial(_saved, 4), last=3, oldest=1, keys={"load_step": 1}),
    Scene("weights alone at the end", partial(_saved, 2), last=3, oldest=2, keys={"last_save_model_only": True}),
)


def go(root: Path, world: World, mode: str, scene: Scene, *, resume: bool = True) -> int:
    """Start in ``root`` and run to the end; returns the step it went on from."""
    keys = {"async_mode": mode, "keep_latest_k": KEPT, **scene.keys}
    run = Run(root, world, shape=SMALL, resume=resume, **keys)
    began = run.state.step
    while run.state.step < scene.last:
        run.step(last=run.state.step == scene.last - 1)
        run.checkpointer.finish()
    run.checkpointer.export(scene.last)
    run.close()
    return began


def kills_everywhere(world: World, work: Path, mode: str, scene: Scene, tried: Some = ALL) -> Report:
    """One process after the other dies at each thing that is done to the files, and the next one goes on."""
    report, before = Report(), work / "before"
    with watched(Disk(before)):
        scene.prepare(before, world)

    def start(name: str, fault: Fault) -> list[str]:
        root = work / name
        shutil.copytree(before, root)
        with watched(Disk(root, fault)) as disk, said(logging.INFO) as lines:
            with suppress(Killed, CheckpointError):
                go(root, world, mode, scene, resume=not scene.fresh)
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
        report.wrong += [f"{name}: {text}" for text in resumed(root, world, mode, scene, lines)]
        shutil.rmtree(root)
        return disk.operations

    report.operations = start("undisturbed", nothing)
    for number in tried.of(report.operations):
        start(title(number, report.operations), dead(number))
        report.tried += 1
    return report


def resumed(root: Path, world: World, mode: str, scene: Scene, lines: list[str]) -> list[str]:
    """Start again after a kill; what is wrong with where that began and how it ended. ``lines`` is what was said."""
    saved = [int(match[1]) for line in lines if (match := re.match(r"saved step (\d+) in", line))]
    with watched(Disk(root)):
        began = go(root, world, mode, scene)
    wrong = wrong_in(root, scene.last)
    if began < max([scene.oldest, *saved]):
        wrong.append(f"went on from step {began}; step {max([scene.oldest, *saved])} was saved")
    if scene.fresh and began < scene.last:
        wrong.append(f"went on from step {began}; step {scene.last} had been there before")
    if scene.keys.get("last_save_model_only"):
        export = UPath(root / f"step-{scene.last}-export")
        try:
            manifest = Manifest.read(export)
            problem = damage(export, manifest, manifest.files)
        except CheckpointError as error:
            problem = str(error)
        wrong += [problem] if problem else []
    return wrong


def dies(world: World, work: Path, mode: str, scene: Scene, number: int) -> None:
    """A true SIGKILL at the operation of this number, in a copy of what lies ``before`` in ``work``."""
    root = work / str(number)
    shutil.copytree(work / "before", root)
    with watched(Disk(root, killed(number))):
        go(root, world, mode, scene, resume=not scene.fresh)


def prepared(world: World, work: Path, mode: str, scene: Scene) -> list[str]:
    """Make ``before``; returns what an undisturbed run does to the files."""
    scene.prepare(work / "before", world)
    shutil.copytree(work / "before", work / "0")
    with watched(Disk(work / "0")) as disk:
        go(work / "0", world, mode, scene, resume=not scene.fresh)
    return disk.operations


def resume_all(world: World, work: Path, mode: str, scene: Scene, numbers: list[int]) -> list[str]:
    """Go on in each of the copies in which a process was killed; what is wrong."""
    return [f"{n}: {text}" for n in numbers for text in resumed(work / str(n), world, mode, scene, [])]
