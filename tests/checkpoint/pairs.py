"""Saving in one layout and going on in another: which are tried, and how far that is from never having stopped.

A run of six steps saves after three; every other one takes that step and goes on for three. What they are held against
is one process that saves nothing. No degree divides the vocabulary of 101, nor that of 2049.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.equivalence.layouts import Layout, Model, base_argv
from tests.launch import run_ranks
from tests.runs import Outcome, run_jobs
from torchtitan.distributed.world import World
from torchtitan.log import logger

STEPS, SAVED = 6, 3
TOLERANCE = 1e-5
SEEN = 1e-4
"""What a comparison that can fail shows of an optimizer that starts anew."""

LAYOUTS = (
    *({"dp": degree} for degree in (1, 2, 3, 4, 8)),
    {"tp": 2},
    {"pp": 2, "schedule": "1F1B"},
    {"pp": 2, "schedule": "ZBVZeroBubble"},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"dp": 2, "cp": 2},
)


@dataclass(frozen=True)
class Run:
    """What is run: a layout, with a vocabulary and more overrides if they are not the usual ones."""

    layout: Layout
    vocabulary: int = 101
    overrides: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # a layout's keys are a dictionary

    @property
    def name(self) -> str:
        words = [self.layout.name.replace(", schedule", ",")]
        words += [f"vocabulary {self.vocabulary}"] if self.vocabulary != 101 else []
        return ", ".join((*words, *(override.rpartition(".")[2] for override in self.overrides)))

    def argv(self, folder: Path, run: Path) -> list[str]:
        return [
            *base_argv(folder),
            *self.layout.argv(),
            f"--model.args.vocab_size={self.vocabulary}",
            *self.overrides,
            f"--training.steps={STEPS}",
            f"--job.dump_folder={run}",
            "--metrics.log_freq=1",
        ]

    def reference(self) -> "Run":
        """The same numbers on one process."""
        return Run(Layout({}, self.layout.model), self.vocabulary)


@dataclass(frozen=True)
class Pair:
    """A run that is saved and one that goes on; ``differs``: with a fault that the comparison has to see."""

    before: Run
    after: Run
    differs: bool = False

    @property
    def name(self) -> str:
        return f"{self.before.name} → {self.after.name}"


@dataclass
class Verdict:
    """Of one pair: largest deviations from the uninterrupted one process, and whether weights, losses and norms are to
    the bit those of the uninterrupted run in the layout that goes on (None: another one was saved)."""

    pair: Pair
    loss: float
    norm: float
    exact: bool | None = None

    @property
    def good(self) -> bool:
        if self.pair.differs:
            return max(self.loss, self.norm) > SEEN
        return max(self.loss, self.norm) <= TOLERANCE and self.exact is not False


def pairs_of(layouts: Sequence[Mapping[str, object]], model: Model) -> list[Pair]:
    """Each layout saved with each that goes on."""
    runs = [Run(Layout(layout, model)) for layout in layouts]
    return [Pair(before, after) for before in runs for after in runs]


def special_pairs() -> list[Pair]:
    """A larger vocabulary, kernels of the optimizer that change on the way, and a fault."""

    def run(vocabulary: int = 101, *overrides: str, **keys: int) -> Run:
        return Run(Layout(keys), vocabulary, overrides)

    fused, foreach = (f"--optimizer.implementation={kernel}" for kernel in ("fused", "foreach"))
    return [
        Pair(run(2049, dp=4), run(2049, dp=4)),
        Pair(run(2049, dp=4), run(2049, dp=3)),
        Pair(run(2049, dp=2, tp=2), run(2049, pp=2, dp=2)),
        Pair(run(101, fused, dp=2), run(101, foreach, dp=2)),
        Pair(run(101, fused, dp=4), run(101, foreach, tp=2)),
        Pair(run(101, foreach, tp=2), run(101, fused, dp=3)),
        excluded(),
    ]


def excluded() -> Pair:
    """What the comparison has to see: the optimizer's states are not taken."""
    before = Run(Layout({"dp": 2}))
    return Pair(before, replace(before, overrides=("--checkpoint.exclude_from_loading=optimizer",)), differs=True)


@dataclass
class Proof:
    """Runs and pairs of them in a folder: one launch of each number of ranks saves, another one goes on."""

    folder: Path
    timeout: float = 600.0
    references: dict[Run, Outcome] = field(default_factory=dict)
    through: dict[Run, Outcome] = field(default_factory=dict)

    def verdicts(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """Of each pair, in order."""
        self.references |= self._run({pair.before.reference(): [] for pair in pairs}, "reference")
        self.through |= self._run({pair.before: _SAVES for pair in pairs}, "through")
        verdicts: dict[Pair, Verdict] = {}
        for ranks in sorted({pair.after.layout.ranks for pair in pairs}):
            some = [pair for pair in pairs if pair.after.layout.ranks == ranks]
            argvs = [self._argv_after(n, pair) for n, pair in enumerate(some)]
            outcomes = run_ranks(quiet_jobs, ranks, argvs, timeout=self.timeout)[0]
            verdicts |= {pair: self._verdict(pair, outcome) for pair, outcome in zip(some, outcomes, strict=True)}
        return [verdicts[pair] for pair in pairs]

    def _run(self, runs: Mapping[Run, Sequence[str]], kind: str) -> dict[Run, Outcome]:
        known: dict[Run, Outcome] = {}
        for ranks in sorted({run.layout.ranks for run in runs}):
            some = [run for run in runs if run.layout.ranks == ranks]
            argvs = [[*run.argv(self.folder, self._place(kind, run)), *runs[run]] for run in some]
            known |= zip(some, run_ranks(quiet_jobs, ranks, argvs, timeout=self.timeout)[0], strict=True)
        return known

    def _place(self, kind: str, run: Run) -> Path:
        return self.folder / kind / run.name

    def _argv_after(self, number: int, pair: Pair) -> list[str]:
        return [
            *pair.after.argv(self.folder, self.folder / "after" / str(pair.after.layout.ranks) / str(number)),
            "--checkpoint.enable",
            f"--checkpoint.folder={self._place('through', pair.before) / 'checkpoint'}",
            f"--checkpoint.load_step={SAVED}",
            "--checkpoint.load_only",
        ]

    def _verdict(self, pair: Pair, got: Outcome) -> Verdict:
        expected, through = self.references[pair.before.reference()], self.through[pair.before]
        assert got.steps == list(range(SAVED + 1, STEPS + 1)) and got.rows == expected.rows[SAVED:]
        loss, norm = deviation(got, expected)
        exact = None
        if pair.before == pair.after:
            same_numbers = (got.losses, got.norms) == (through.losses[SAVED:], through.norms[SAVED:])
            exact = same_numbers and all(torch.equal(got.weights[n], w) for n, w in through.weights.items())
        return Verdict(pair, loss, norm, exact)


def quiet_jobs(world: World, argvs: Sequence[Sequence[str]]) -> list[Outcome]:
    """The runs, without a word on how few of the vocabulary's rows are used."""
    logger.addHandler(logging.NullHandler())
    return run_jobs(world, argvs)


_SAVES = ["--checkpoint.enable", f"--checkpoint.interval={SAVED}"]


def deviation(got: Outcome, expected: Outcome) -> tuple[float, float]:
    """The largest of losses, and of norms relative to their size, over the last steps."""
    last = len(got.losses)
    return (
        max(abs(a - b) for a, b in zip(got.losses, expected.losses[-last:], strict=True)),
        max(abs(a - b) / b for a, b in zip(got.norms, expected.norms[-last:], strict=True)),
    )


def table(verdicts: Iterable[Verdict]) -> str:
    """Rows: what was saved; columns: what went on; the larger of two deviations, ``=`` where equal to the bit."""
    cells = {(v.pair.before.name, v.pair.after.name): v for v in verdicts}
    names = list(dict.fromkeys(before for before, _ in cells))
    wide = max(map(len, names))
    lines = [" " * (wide + 4) + " ".join(f"{n + 1:>7d}" for n in range(len(names)))]
    for n, before in enumerate(names):
        marks = []
        for after in names:
            verdict = cells[before, after]
            figure = f"{max(verdict.loss, verdict.norm):.1e}"
            marks.append(f"{figure}{'=' if verdict.exact else ''}{'' if verdict.good else '!'}".rjust(7))
        lines.append(f"{n + 1:2d} {before:{wide}s} " + " ".join(marks))
    return "\n".join(lines)


def largest(verdicts: Iterable[Verdict]) -> float:
    """The largest deviation of any pair."""
    return max((max(v.loss, v.norm) for v in verdicts), default=math.nan)
