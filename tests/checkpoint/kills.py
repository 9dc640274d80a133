"""Runs that are killed at random, again and again, and started anew by the same command until they are done.

What must come of it is what comes of a run that nobody kills.
"""

import contextlib
import json
import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from upath import UPath

from tests.launch import await_end, kill_ranks, run_ranks, started, with_descendants
from tests.runs import metrics, run_job, tiny_argv
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.storage import StepFolders
from torchtitan.distributed.world import World
from torchtitan.log import logger

MODES = ("disabled", "async", "async_with_pinned_mem")
EVERY = 3
_FIRST_STEP = re.compile(r"; steps (\d+) to \d+")


@dataclass(frozen=True)
class Life:
    """One start of a run: which step was saved before, at which step it began (None: killed before it said so), and
    what lay half written when it was killed (None: it came to its end)."""

    saved: int
    began: int | None
    left: tuple[str, ...] | None

    @property
    def killed(self) -> bool:
        return self.left is not None

    @property
    def good(self) -> bool:
        return self.began in (None, self.saved + 1)


@dataclass
class Chain:
    """The lives of one run, and what is wrong with its end."""

    lives: list[Life] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(life.killed for life in self.lives)

    @property
    def inside(self) -> int:
        """Kills after which something lay half written."""
        return sum(bool(life.left) for life in self.lives)


def argv_of(folder: Path, mode: str, steps: int, run: str) -> list[str]:
    """A run that saves every third step and keeps four of them."""
    return tiny_argv(
        folder,
        f"--training.steps={steps}",
        "--checkpoint.enable",
        f"--checkpoint.interval={EVERY}",
        "--checkpoint.keep_latest_k=4",
        f"--checkpoint.async_mode={mode}",
        run=run,
    )


def uninterrupted(folder: Path, ranks: int, steps: int) -> Path:
    """The folder of a run that nobody kills; of its mode nothing but its time depends."""
    run_ranks(run_job, ranks, argv_of(folder, "disabled", steps, f"whole-{ranks}"))
    return folder / f"whole-{ranks}"


def live(world: World, argv: Sequence[str], log: Path) -> None:
    """Run to the end, writing the log into a file."""
    logger.addHandler(logging.FileHandler(log, mode="w") if world.rank == 0 else logging.NullHandler())
    logger.setLevel(logging.INFO)
    run_job(world, argv)


Start = Callable[[Callable[[], bool]], bool]
"""Starts the run and kills it when told to; False if it ended before. Its log is in ``log`` beside its folder."""


def forked(argv: Sequence[str], ranks: int, log: Path) -> Start:
    """On ranks that start in a fraction of a second."""
    return lambda when: kill_ranks(live, ranks, argv, log, when=when)


def launched(argv: Sequence[str], ranks: int, log: Path) -> Start:
    """By the launcher that users have, killed with all that it started."""
    environment = os.environ | {"NGPU": str(ranks), "CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "torchtitan.launch", *argv]

    def start(when: Callable[[], bool]) -> bool:
        with log.open("w") as file, started(command, stderr=file, env=environment) as process:
            while process.poll() is None and not when():
                time.sleep(0.001)
            if process.returncode is not None:
                assert process.returncode == 0, log.read_text()
                return False
            pids = with_descendants(process.pid)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            await_end(pids, time.monotonic() + 10)
            return True

    return start


def chain(run: Path, reference: Path, start: Start, whens: Sequence[Callable[[], bool]]) -> Chain:
    """Kill the run at each of ``whens`` in turn, then let it come to its end, and hold it against ``reference``."""
    lived, folders, log = Chain(), StepFolders(UPath(run / "checkpoint")), run.with_suffix(".log")
    for when in (*whens, never):
        saved = max(folders.steps(), default=0)
        log.unlink(missing_ok=True)
        killed = start(when)
        said = _FIRST_STEP.search(log.read_text()) if log.exists() else None
        left = tuple(sorted(f.name for f in folders.root.glob("step-*.*"))) if killed else None
        lived.lives.append(Life(saved, int(said[1]) if said else None, left))
        if not killed:
            break
    lived.problems += [f"began at {life.began}, saved was {life.saved}" for life in lived.lives if not life.good]
    lived.problems += differences(run, reference)
    return lived


def never() -> bool:
    return False


def in_a_save(run: Path, number: int, seconds: float) -> Callable[[], bool]:
    """``seconds`` after the ``number``-th save has begun."""
    asked: list[int] = []
    at: list[float] = []

    def when() -> bool:
        asked.append(time.time_ns())
        if not at:
            partial = (run / "checkpoint").glob("step-*.partial")
            names.update(folder.name for folder in partial if _changed(folder) > asked[0])
            if len(names) >= number:
                at.append(time.monotonic() + seconds)
        return bool(at) and time.monotonic() >= at[0]

    names: set[str] = set()
    return when


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:  # it has just got its name
        return 0


def after(seconds: float) -> Callable[[], bool]:
    """``seconds`` after it is asked first."""
    began: list[float] = []

    def when() -> bool:
        began.append(time.monotonic())
        return began[-1] - began[0] >= seconds

    return when


def at_random(run: Path, draw: random.Random) -> Callable[[], bool]:
    """Three of four a few milliseconds into one of the first saves, the others anywhere in the first seconds."""
    if draw.random() < 0.75:
        return in_a_save(run, draw.choice((1, 1, 2, 3)), draw.choice((0, 0.002, 0.005, 0.01, 0.02, 0.04)))
    return after(draw.uniform(0, 3))


def differences(run: Path, reference: Path) -> list[str]:
    """In what the end of a run is not that of another: logged steps, tensors of the last step to the bit, and what else
    lies among the steps."""
    problems = []
    ours, theirs = metrics(run), metrics(reference)
    for key in ("step", "loss", "grad_norm", "lr", "tokens_seen"):
        if [line[key] for line in ours] != [line[key] for line in theirs]:
            problems.append(f"{key} in metrics.jsonl differs")
    roots = [folder / "checkpoint" for folder in (run, reference)]
    last = int(theirs[-1]["step"])
    a, b = (Reader(UPath(root / f"step-{last}")) for root in roots)
    problems += [f"{name} is there once" for name in sorted(set(a.tensors) ^ set(b.tensors))]
    problems += [
        f"{name} differs" for name in a.tensors if name in b.tensors and not torch.equal(a.tensor(name), b.tensor(name))
    ]
    numbers = [json.loads((root / f"step-{last}" / "manifest.json").read_text())["state"] for root in roots]
    problems += ["numbers in the manifest differ"] if numbers[0] != numbers[1] else []
    complete = {f"step-{step}" for step in StepFolders(UPath(roots[0])).steps()}
    problems += [f"{f.name} is left over" for f in roots[0].iterdir() if f.name not in complete]
    problems += [f"{f} is left over" for f in roots[0].rglob("*.tmp")]
    if not 2 <= len(complete) <= 4:
        problems.append(f"{len(complete)} steps were kept")
    return problems


@dataclass(frozen=True)
class Way:
    """How runs are started, in which mode, on how many ranks."""

    mode: str
    ranks: int
    start: Callable[[Sequence[str], int, Path], Start] = forked

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.start.__name__}"


def chains(folder: Path, way: Way, reference: Path, kills: int, steps: int, draw: random.Random) -> list[Chain]:
    """Runs until there were so many ``kills`` among them."""
    done: list[Chain] = []
    while (left := kills - sum(c.kills for c in done)) > 0:
        name = f"{way.name}, {len(done)}".replace(", ", "-").replace(" ", "-")
        run = folder / name
        start = way.start(argv_of(folder, way.mode, steps, name), way.ranks, run.with_suffix(".log"))
        done.append(chain(run, reference, start, [at_random(run, draw) for _ in range(left)]))
    return done
