"""Holds checkpoints against what is said of them: python scripts/prove_checkpoints.py [PARTS ...]

Parts: pairs (each layout is saved and goes on in each), kills (at random, and the restarts), disks (full, read-only,
slow), rot (a bit of a file), deaths (at each thing a save does to its files), beside (what a save costs training).
Without PARTS all of them, in that order. Needs the test dependencies, 4 GB of disk below TMPDIR, and for ``beside`` two
cores that do nothing else. Ends with 1 if anything is not as it should be.
"""

import argparse
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.checkpoint.beside import TARGETS, Size, cost, growth, memory
from tests.checkpoint.disk import NAMES, Some
from tests.checkpoint.faults import (
    Report,
    a_disk_that_becomes_read_only,
    a_slow_storage,
    a_small_disk,
    failing_storage,
    flipped,
    small_disk,
)
from tests.checkpoint.kills import MODES, Way, chains, launched, uninterrupted
from tests.checkpoint.pairs import LAYOUTS, Proof, largest, pairs_of, special_pairs, table
from tests.checkpoint.scenes import SCENES, Scene, dies, kills_everywhere, prepared, resume_all
from tests.equivalence.layouts import Model
from tests.launch import RanksFailed, run_ranks
from tests.runs import tiny_argv

BESIDE = ("async", "async_with_pinned_mem")


def pairs(folder: Path, options: argparse.Namespace) -> int:
    """Every layout is saved and goes on in every other one."""
    proof, wrong = Proof(folder, timeout=1800), 0
    for words, model in (("untied", Model()), ("tied", Model(tied=True))):
        verdicts = proof.verdicts(pairs_of(LAYOUTS, model))
        wrong += sum(not verdict.good for verdict in verdicts)
        exact = sum(verdict.exact is True for verdict in verdicts)
        print(f"{words}: largest deviation of loss and relative norm; rows were saved, columns went on; = to the bit")
        print(table(verdicts), flush=True)
        print(f"{len(verdicts)} pairs, largest {largest(verdicts):.1e}, {exact} of {len(LAYOUTS)} same ones to the bit")
    for verdict in proof.verdicts(special_pairs()):
        wrong += not verdict.good
        words = "on purpose, must differ: " if verdict.pair.differs else ""
        exact = {None: "", True: ", to the bit", False: ", NOT TO THE BIT"}[verdict.exact]
        print(
            f"{words}{verdict.pair.name}: loss {verdict.loss:.1e}, norm {verdict.norm:.1e}{exact}"
            f"{'' if verdict.good else '  WRONG'}"
        )
    return wrong


def kills(folder: Path, options: argparse.Namespace) -> int:
    """Runs are killed at random and started again; what comes of them is what comes of one that nobody kills."""
    draw, wrong, steps = random.Random(options.seed), 0, 60
    references = {ranks: uninterrupted(folder, ranks, steps) for ranks in (1, 2)}
    half = options.kills // 2
    ways = [(Way(mode, ranks), half) for mode in MODES for ranks in (1, 2)]
    ways += [(Way(mode, 2, launched), max(1, options.kills // 8)) for mode in MODES]
    title = f"killed with SIGKILL, started again (seed {options.seed})"
    print(f"{title:48s} {'runs':>5s} {'kills':>6s} in a save", flush=True)
    for way, number in ways:
        done = chains(folder, way, references[way.ranks], number, steps, draw)
        problems = [problem for chain in done for problem in chain.problems]
        killed, inside = sum(chain.kills for chain in done), sum(chain.inside for chain in done)
        if way.start is not launched and inside < killed / 2:
            problems.append("fewer than half of the kills fell into a save")
        said = "; ".join(problems) or "as if never killed"
        print(f"{way.name:48s} {len(done):5d} {killed:6d} {inside:9d}  {said}", flush=True)
        wrong += bool(problems)
    return wrong


def disks(folder: Path, options: argparse.Namespace) -> int:
    """Storages that fail at each thing that a save does to its files, true small and read-only ones, and slow ones."""
    wrong = 0
    cases = itertools.product((1, 2), ("disabled", "async"), ("full", "read-only"), (True, False), (False, True))
    for n, (ranks, mode, fault, once, last) in enumerate(cases):
        fail = partial(failing_storage, fault=fault, once=once, last=last, tried=Some(writes=options.writes))
        report = run_ranks(fail, ranks, folder / str(n), mode, timeout=1800)[0]
        words = [f"{ranks} rank{'s' * (ranks > 1)}", mode, fault, "once" if once else "from then on"]
        what = f"{', '.join(words)}{', the last save' if last else ''}"
        wrong += tell(what, report, f"of {len(report.operations)} operations; {report.told} told")
    with small_disk(folder / "disk") as disk:
        for mode in MODES:
            if disk is None:
                print("a true small disk: skipped, this user may not mount one")
                break
            (report,) = run_ranks(a_small_disk, 1, disk, mode, timeout=600)
            wrong += tell(f"a true disk, so many pages are left, {mode}", report, f"{report.told} told, then it fitted")
            (report,) = run_ranks(a_disk_that_becomes_read_only, 1, disk / mode, mode, disk)
            wrong += tell(f"a true disk becomes read-only and is mended, {mode}", report, f"{report.told} told")
    seconds, _, steps = run_ranks(a_slow_storage, 2, folder / "slow")[0]
    report = Report(tried=1, wrong=[] if seconds < 1.5 and steps[0] == 1 else [f"{seconds:.1f} s, saved {steps}"])
    wrong += tell("2 s a file, ten steps of nothing, async", report, f"{seconds:.2f} s")
    return wrong


def rot(folder: Path, options: argparse.Namespace) -> int:
    """One bit of each file of the newest step changes."""
    steps = ["--training.steps=6", "--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=20"]
    report = run_ranks(flipped, 2, folder, tiny_argv(folder, *steps), (0, 0.3, 1), timeout=900)[0]
    return tell("one bit, in three places", report, f"of {', '.join(dict.fromkeys(report.operations))}")


def deaths(folder: Path, options: argparse.Namespace) -> int:
    """The process dies at each thing that a run does to its files."""
    wrong = 0
    for scene, mode in itertools.product(SCENES, ("disabled", "async")):
        work = folder / f"{mode}-{scene.name}"
        (report,) = run_ranks(kills_everywhere, 1, work, mode, scene, Some(writes=options.writes), timeout=3600)
        wrong += tell(f"dead, {mode}: {scene.name}", report, f"of {len(report.operations)} operations")
    for scene in SCENES:
        report = true_kills(folder / f"true-{scene.name}", "async", scene)
        wrong += tell(f"SIGKILL, async: {scene.name}", report, f"of {len(report.operations)} operations")
    return wrong


def tell(what: str, report: Report, figures: str) -> bool:
    """Print a line, and what is wrong; True if something is."""
    print(f"{what:64s} {report.tried:5d} tried, {figures}{'  WRONG' if report.wrong else ''}", flush=True)
    for text in report.wrong:
        print(f"    {text}")
    return bool(report.wrong)


def true_kills(work: Path, mode: str, scene: Scene) -> Report:
    """A process dies at every name that is made, changed or removed."""
    (operations,) = run_ranks(prepared, 1, work, mode, scene)
    report, numbers = Report(operations), Some(kinds=NAMES).of(operations)
    for number in numbers:
        try:
            run_ranks(dies, 1, work, mode, scene, number)
            report.wrong.append(f"{number}: it came to its end")
        except RanksFailed as error:
            report.wrong += [] if "ended with -9" in str(error) else [f"{number}: {error}"]
        report.tried += 1
    (wrong,) = run_ranks(resume_all, 1, work, mode, scene, numbers)
    report.wrong += wrong
    return report


def beside(folder: Path, options: argparse.Namespace) -> int:
    """What a save costs training, and what many cost memory."""
    size = Size(dim=128, layers=2, vocabulary=4000, interval=4, threads=1) if options.small else Size()
    wrong = 0
    print(f"{size.repetitions} times {size.interval} steps with a save and without, {size.threads} threads; medians")
    print(f"{'mode':22s} million    MB    step  ratio   stall longest   write")
    for mode in MODES:
        (measured,) = run_ranks(cost, 1, folder, mode, size, timeout=3600)
        shutil.rmtree(folder / mode)
        figures = measured.figures()
        over = [key for key, most in TARGETS.items() if figures[key] > most and mode in BESIDE]
        wrong += bool(over)
        print(
            f"{mode:22s} {measured.parameters / 1e6:7.1f} {measured.bytes / 1e6:5.0f} {measured.step:5.2f} s "
            f"{figures['ratio']:6.3f} {figures['stall']:5.3f} s {figures['longest']:7.2f} "
            f"{statistics.median(measured.written):5.1f} s{'  OVER: ' + ', '.join(over) if over else ''}"
        )
        each = zip(measured.with_save, measured.without, measured.stall, measured.longest, strict=True)
        for with_save, without, stall, longest in each:
            print(f"  {with_save:.2f} s with, {without:.2f} s without, stall {stall:.3f} s, longest {longest:.2f} s")
        print(f"  written: {', '.join(f'{seconds:.1f} s' for seconds in measured.written)}", flush=True)
    for mode in MODES:
        (after,) = run_ranks(memory, 1, folder, mode, size, 21, timeout=3600)
        shutil.rmtree(folder / mode)
        over = growth(after) > 0.05 and mode in BESIDE
        wrong += over
        print(f"{mode}: anonymous MiB after each save: {' '.join(str(kb // 1024) for kb in after)}")
        print(f"  growth after the first ones {growth(after):.1%}{'  OVER' if over else ''}", flush=True)
    return wrong


PARTS = {part.__name__: part for part in (pairs, kills, disks, rot, deaths, beside)}


def start_ranks_quietly() -> None:
    """What ranks say on standard error is not shown: what matters of it comes back as their results and errors."""
    shown, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    ensure_running()
    os.dup2(shown, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--kills", type=int, default=30, help="kills of each mode (default: %(default)s)")
    parser.add_argument("--writes", type=int, default=10, help="faults at every n-th write (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="beside: a small model and few steps, to try it")
    parser.add_argument("--seed", type=int, default=0, help="of what comes at random (default: %(default)s)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = work
        start_ranks_quietly()
        for name in options.parts or PARTS:
            start, folder = time.perf_counter(), Path(work) / name
            folder.mkdir()
            found = PARTS[name](folder, options)
            shutil.rmtree(folder)
            print(f"{name}: {int(found)} wrong, {time.perf_counter() - start:.0f} s\n", flush=True)
            wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
