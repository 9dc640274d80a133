"""Storages that are full, read-only or slow, and files that rot: what that costs, what is said, what goes on.

Each thing that a save does to its files fails in turn, which ``disk.py`` sees to; kills are in ``scenes.py``.
"""

import itertools
import logging
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from upath import UPath

from tests.checkpoint.disk import ALL, Disk, Fault, Some, full, nothing, read_only, watched
from tests.checkpoint.runs import Run, content_is_right, said, storage_that
from tests.runs import run_job
from torchtitan.checkpoint import checkpointer
from torchtitan.checkpoint.manifest import Manifest, damage
from torchtitan.checkpoint.storage import StepFolders
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError

SMALL = (30, 20)
KEPT = 2
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
        run = Run(folder, world, shape=SMALL, async_mode=mode, keep_latest_k=KEPT)
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
        attempt(title(number, report.operations), make(number, number if once else math.inf))
        report.tried += 1
    return report


def title(number: int, operations: list[str]) -> str:
    return f"{number} ({operations[number - 1].replace('/', ' ')})"


def a_slow_storage(world: World, folder: Path) -> tuple[float, list[str], list[int]]:
    """The second rank's disk takes two seconds a file: how long ten steps take, what is said, what is saved."""
    run = Run(folder, world, async_mode="async")

    def sleep(name: str) -> None:
        if world.rank == 1:
            time.sleep(2)

    with storage_that(sleep), said() as lines:
        begin = time.monotonic()
        for _ in range(10):
            run.step()
        seconds = time.monotonic() - begin
        run.step(last=True)
    return seconds, lines, run.folders.steps()


def a_small_disk(world: World, root: Path, mode: str) -> Report:
    """A true disk, ``root``, on which in turn each number of pages is left, from none to enough, for the third save of
    four; the check that comes before a save is told nothing of it."""
    report, page = Report(), 4096
    while not report.tried or report.told == report.tried:
        folder, filler = root / "run", root / "filler"
        with mock.patch.object(checkpointer, "free_bytes", lambda folder: None), said() as lines:
            run = Run(folder, world, shape=SMALL, async_mode=mode, keep_latest_k=KEPT)
            for _ in range(2):
                run.step()
                run.checkpointer.finish()
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(page)):
                    pass
            os.truncate(filler, filler.stat().st_size - report.tried * page)
            run.step()
            run.checkpointer.finish()
            told, is_there = any("step 3 could not be saved" in line for line in lines), 3 in run.folders.steps()
            wrong = wrong_in(folder, 3 if is_there else 2, sweep=False)
            wrong += [] if told != is_there else [f"step 3 is {'' if is_there else 'not '}there, and said was {lines}"]
            filler.unlink()
            run.step()
            run.checkpointer.finish()
            run.close()
        report.wrong += [f"{report.tried} pages: {text}" for text in (*wrong, *wrong_in(folder, 4))]
        report.tried += 1
        report.told += told
        shutil.rmtree(folder)
    return report


def a_disk_that_becomes_read_only(world: World, root: Path, mode: str, disk: Path) -> Report:
    """A true ``disk``, which holds ``root``, is read-only while three saves of six are due, and when the last is."""
    report = Report()
    run = Run(root, world, shape=SMALL, async_mode=mode, keep_latest_k=KEPT)

    def steps(number: int) -> None:
        for _ in range(number):
            run.step()
            run.checkpointer.finish()

    with said() as lines:
        steps(2)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        steps(3)
        report.wrong += wrong_in(root, 2, sweep=False)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        steps(1)
        report.wrong += wrong_in(root, 6)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        try:
            run.step(last=True)
            report.wrong.append("the last save failed and nothing was said")
        except CheckpointError:
            report.told += 1
        report.wrong += wrong_in(root, 6)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    report.tried, report.told = 4, report.told + sum("could not be saved" in line for line in lines)
    report.wrong += [] if report.told == 4 else [f"four saves failed, said was {lines}"]
    return report


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A true disk of 32 MiB at ``folder``; None where this user may not mount one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)], capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# Files that rot


def flip(path: Path, where: float) -> None:
    """Change one bit at this part of the file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def flipped(world: World, work: Path, argv: Sequence[str], where: Sequence[float]) -> Report:
    """A run of the trainer in ``work / "run"`` is saved; then one bit of each file of its newest step is changed in
    turn, at parts of the file: the step before is taken, and who asks for the step by its number is told the file."""
    report, root, rank = Report(), work / "run" / "checkpoint", world.rank
    run_job(world, argv)
    newest, before = (StepFolders(UPath(root)).steps()[n] for n in (-1, -2))
    names = sorted(f.name for f in (root / f"step-{newest}").iterdir())
    for name, part in itertools.product(names, where):
        world.barrier()
        copied = work / f"{name}-{part}"
        if rank == 0:
            shutil.copytree(root, copied)
            flip(copied / f"step-{newest}" / name, part)
        world.barrier()
        folder = [*argv, f"--checkpoint.folder={copied}", "--checkpoint.load_only"]
        folder += [f"--job.dump_folder={work / 'after' / copied.name}"]
        with said(logging.INFO) as lines:
            run_job(world, folder)
        if not any(f"going on after step {before} " in line for line in lines):
            report.wrong.append(f"{copied.name}: step {before} was not taken: {lines}")
        if not any(name in line and "trying the step before" in line for line in lines):
            report.wrong.append(f"{copied.name}: was not named")
        try:
            run_job(world, [*folder, f"--checkpoint.load_step={newest}"])
            report.wrong.append(f"{copied.name}: was taken when asked for")
        except CheckpointError as error:
            if name not in str(error):
                report.wrong.append(f"{copied.name}: {error}")
        report.operations.append(name)
        report.tried += 1
    return report
