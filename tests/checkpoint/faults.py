"""Saves on disks that are full or read-only, and kills at everything a save does: what is left and what goes on.

Each thing that a save does to its files fails in turn, which ``disk.py`` sees to; the run is the least there is.
"""

import logging
import math
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

from tests.checkpoint.disk import ALL, Disk, Fault, Killed, Some, dead, full, killed, nothing, read_only, watched
from tests.checkpoint.runs import Run, content_is_right, said
from torchtitan.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, damage
from torchtitan.checkpoint.storage import StepFolders
from torchtitan.distributed.world import World

SMALL = (30, 20)
_KEPT = 2
_FAULTS: dict[str, Callable[[int, float], Fault]] = {"full": full, "read-only": read_only}


@dataclass
class Report:
    """What was tried: the operations, and in the words of what is wrong, what did not go as it must."""

    operations: list[str] = field(default_factory=list)
    tried: int = 0
    told: int = 0
    wrong: list[str] = field(default_factory=list)


def wrong_in(root: Path, newest: int, *, sweep: bool = True) -> list[str]:
    """What is wrong with the steps below ``root``, of which ``newest`` must be one; after a ``sweep`` nothing but
    complete steps may lie there."""
    folders = StepFolders(UPath(root))
    steps, wrong = folders.steps(), []
    if steps[-1:] != [newest]:
        wrong.append(f"the newest step is {steps[-1:]}, not {newest}")
    for step in steps:
        manifest = Manifest.read(folders.path(step))
        problem = damage(folders.path(step), manifest, manifest.files)
        if problem or not content_is_right(folders, step):
            wrong.append(problem or f"step {step} holds something else")
    known = {f"step-{step}" for step in steps}
    left = [f.name for f in root.iterdir() if f.name not in known and ".superseded" not in f.name]
    left = [name for name in left if not name.endswith("-export")]
    if sweep and left:
        wrong.append(f"left over: {', '.join(sorted(left))}")
    return wrong


# A storage that fails


def failing_storage(
    world: World, root: Path, mode: str, fault: str, once: bool, last: bool = False, tried: Some = ALL
) -> Report:
    """The third save of four fails on the last rank at each of its operations in turn (``once``: at that one, else at
    all that follow in that save too); with ``last`` it is the end of the run, and CheckpointError."""
    report, rank, faulty = Report(), world.rank, world.size - 1
    make = _FAULTS[fault]

    def attempt(name: str, fault: Fault) -> Disk:
        folder = root / name
        run = Run(folder, world, shape=SMALL, async_mode=mode, keep_latest_k=_KEPT)
        with watched(Disk(folder)):
            for _ in range(2):
                run.step()
                run.checkpointer.finish()
        error = ""
        with watched(Disk(folder, fault if rank == faulty else nothing)) as disk, said() as lines:
            try:
                run.step(last=last)
                run.checkpointer.finish()
            except CheckpointError as problem:
                error = str(problem)
        is_there, told = 3 in run.folders.steps(), bool(error) or any("step 3 could not be saved" in x for x in lines)
        world.barrier()
        wrong = []
        # Renamed, but nobody knows whether that would outlast the machine.
        unsure = world.gather(disk.failed[:1])[faulty] == ["fsync "]
        if told == is_there and not unsure:
            wrong.append(f"step 3 is {'' if is_there else 'not '}there, and said was {error or lines}")
        if bool(error) != (told and last):
            wrong.append(f"error {error!r}")
        wrong += wrong_in(folder, 3 if is_there else 2, sweep=False)
        world.barrier()
        if not last:
            with watched(Disk(folder)):
                run.step()
                run.checkpointer.finish()
            wrong += wrong_in(folder, 4)
        run.close()
        world.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        report.wrong += [f"{name}: {text}" for text in wrong]
        report.told += told
        return disk

    count = attempt("undisturbed", nothing).operations
    report.operations = world.gather(count)[faulty]
    for number in tried.of(report.operations):
        attempt(_title(number, report.operations), make(number, number if once else math.inf))
        report.tried += 1
    return report


def _title(number: int, operations: list[str]) -> str:
    return f"{number} ({operations[number - 1].replace('/', ' ')})"


# A process that is killed


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


def flip(path: Path, where: float) -> None:
    """Change one bit at this part of the file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def go(root: Path, world: World, mode: str, scene: Scene, *, resume: bool = True) -> int:
    """Start in ``root`` and run to the end; returns the step it went on from."""
    keys = {"async_mode": mode, "keep_latest_k": _KEPT, **scene.keys}
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
        start(_title(number, report.operations), dead(number))
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
