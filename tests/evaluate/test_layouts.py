"""Validation in runs of the real trainer: one number in every layout, and a run that is as if there had been none."""

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.launch import run_ranks
from tests.runs import Outcome, metrics, run_job, run_jobs, tiny_argv, tiny_text
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.evaluate import Evaluator
from torchtitan.feed import open_source
from torchtitan.observe import clock
from torchtitan.observe.metrics import ValidationStats
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job

STEPS = 3
SEQ_LEN = 24
DUE = [1, 2, 3]
ROWS = {"whole": 7, "first": 2}
LENGTHS = [5, 17, 0, 1, 30, 40, 12, 41]
"""Of the held-out documents, in bytes: with BOS and EOS 162 tokens, six rows and a bit."""

LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {
        "one": [],
        "one, documents": ["--data.packing=documents"],
        "one, best_fit": ["--data.packing=best_fit"],
    },
    2: {
        "dp 2, workers": ["--validation.dataloader.num_workers=1", "--validation.local_batch_size=1"],
        "tp 2": ["tensor_parallel_degree=2"],
        "cp 2, documents": ["--data.packing=documents", "context_parallel_degree=2"],
        "pp 2": ["pipeline_parallel_degree=2", "--training.local_batch_size=6", "--validation.local_batch_size=4"],
        "pp 2 in a V, rows by twos": [
            "pipeline_parallel_degree=2",
            "pipeline_parallel_schedule=ZBVZeroBubble",
            "pipeline_parallel_microbatch_size=2",
            "--model.args.n_layers=4",
            "--training.local_batch_size=6",
        ],
    },
    3: {"dp 3": ["--validation.local_batch_size=1"]},
    4: {
        "dp 4": [],
        "dp 2, tp 2": ["tensor_parallel_degree=2"],
        "dp 2, pp 2": ["pipeline_parallel_degree=2", "--training.local_batch_size=3"],
    },
}
RANKS = {name: ranks for ranks, layouts in LAYOUTS.items() for name in layouts}
FEW = ("one", "pp 2", "dp 3", "dp 4")
"""Layouts in which a round of the first rows, fewer than some of them have ranks, is tried as well."""
CASES = [(layout, rows) for layout in RANKS for rows in ROWS if rows == "whole" or layout in FEW]


def argv(folder: Path, layout: str, run: str, *more: str) -> list[str]:
    """A run in ``layout``, of the name that it and ``run`` make."""
    words = [word if word.startswith("--") else f"--parallelism.{word}" for word in LAYOUTS[RANKS[layout]][layout]]
    return tiny_argv(folder, f"--training.steps={STEPS}", *words, *more, run=f"{layout}: {run}")


def validation_argv(folder: Path, rows: str) -> list[str]:
    """Validation on documents of its own, of which a round takes the ``whole`` or two ``first`` rows."""
    text = folder / "held-out.jsonl"
    words = "What was not trained on, but looked at."
    if not text.exists():
        text.write_text("\n".join(json.dumps({"text": (words * 2)[:length]}) for length in LENGTHS))
    keys = [] if rows == "whole" else ["steps=1", f"global_batch_size={ROWS[rows]}"]
    keys += ["enable", "dataset=jsonl", f"dataset_path={text}", "freq=2", f"seq_len={SEQ_LEN}"]
    return [f"--validation.{key}" for key in keys]


def spied_run(world: World, argv: Sequence[str]) -> tuple[Outcome, list[str]]:
    """The run, and what its rounds of validation have changed. Each of them seems to take an hour."""
    changed: list[str] = []
    hours = 0
    unspied = Evaluator.round

    def spy(self: Evaluator, step: int, stop: StopRequest) -> list[ValidationStats]:
        nonlocal hours
        named = self._runner.named_parameters
        parts = self._runner.parts
        next(parts[0].children()).eval()

        def state() -> dict[str, Any]:
            found: dict[str, Any] = {f"weight {name}": p.detach().to_local().clone() for name, p in named}
            found |= {f"gradient {name}": p.grad.to_local().clone() for name, p in named if p.grad is not None}
            found |= {
                f"mode {i} {name}": m.training for i, part in enumerate(parts) for name, m in part.named_modules()
            }
            return found | {"generator": torch.get_rng_state()}

        before = state()
        stats = unspied(self, step, stop)
        after = state()
        assert before.keys() == after.keys() and any(name.startswith("gradient") for name in before)
        for name, value in before.items():
            if not (torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]):
                changed.append(f"{name} after step {step}")
        held = {id(p) for part in parts for p in part.parameters()}
        changed.extend(f"{name} is gathered after step {step}" for name, p in named if id(p) not in held)
        hours += 1
        return stats

    Evaluator.round = spy  # type: ignore[method-assign]
    clock.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600 * hours)  # type: ignore[assignment]
    try:
        return run_job(world, argv), changed
    finally:
        Evaluator.round = unspied  # type: ignore[method-assign]
        clock.time = time


def with_and_without(world: World, folder: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """For each layout the run without validation and, by the rows of a round, the ones with it."""
    outcomes: dict[str, Any] = {}
    for layout in layouts:
        outcomes[layout] = {"none": run_job(world, argv(folder, layout, "none"))}
        for rows in (rows for case, rows in CASES if case == layout):
            argv_of = argv(folder, layout, rows, *validation_argv(folder, rows))
            outcomes[layout][rows] = spied_run(world, argv_of)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("validation")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    validation_argv(folder, "whole")
    found: dict[str, Any] = {}
    for ranks, layouts in LAYOUTS.items():
        found |= run_ranks(with_and_without, ranks, folder, list(layouts))[0]
    return found


def validations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("layout", "rows"), CASES)
def test_a_run_with_validation_is_the_run_without(outcomes: dict[str, Any], layout: str, rows: str) -> None:
    without = outcomes[layout]["none"]
    run, changed = outcomes[layout][rows]
    assert changed == []
    assert run.finished and run.steps == list(range(1, STEPS + 1))
    assert run.rows == without.rows
    assert run.losses == without.losses
    assert run.norms == without.norms
    assert run.weights.keys() == without.weights.keys()
    for name, weight in without.weights.items():
        assert torch.equal(run.weights[name], weight), name


@pytest.mark.parametrize("layout", RANKS)
def test_an_hour_of_validation_is_not_training(outcomes: dict[str, Any], folder: Path, layout: str) -> None:
    assert all(line["step_seconds"] < 1800 for line in metrics(folder / f"{layout}: whole"))


def pieces(packing: str, rows: int) -> Iterator[tuple[int, int]]:
    """What is predicted at once: the first token that is seen, and the number of labels after it."""
    ends = list(itertools.accumulate(length + 2 for length in LENGTHS))
    documents = list(zip([0, *ends], ends, strict=False))
    if packing == "best_fit":
        cuts = ((start, end, cut) for start, end in documents for cut in range(start, end - 1, SEQ_LEN))
        yield from ((cut, min(SEQ_LEN, end - 1 - cut)) for _, end, cut in cuts)
        return
    for cut in range(0, min(ends[-1] - 1, rows * SEQ_LEN), SEQ_LEN):
        for start, end in documents if packing == "documents" else [(0, ends[-1])]:
            first, last = max(start, cut), min(end - 1, cut + SEQ_LEN)
            if first < last:
                yield first, last - first


def direct_loss(weights: Mapping[str, torch.Tensor], argv: Sequence[str], rows: int) -> tuple[float, int]:
    """Of a model with these weights on the held-out documents, piece by piece; and the number of labels."""
    job = resolve_job(load_config(argv), 1)
    assert job.validation is not None
    tokens = open_source(job, job.validation.sets[None], rank=0, ranks=1)
    ids = torch.from_numpy(tokens.window(0, len(tokens)))
    model = job.spec.build_meta(job.args).to_empty(device="cpu")
    model.load_state_dict(dict(weights))
    total, count = 0.0, 0
    for start, labels in pieces(job.config.data.packing, rows):
        piece = ids[start : start + labels + 1]
        with torch.no_grad():
            logits = model(piece[None, :-1], torch.arange(labels)[None])
        total += float(cross_entropy(logits[0].double(), piece[1:], reduction="sum"))
        count += labels
    return total / count, count


@pytest.mark.parametrize(("layout", "rows"), CASES)
def test_the_loss_is_that_of_the_text_in_every_layout(
    outcomes: dict[str, Any], folder: Path, layout: str, rows: str
) -> None:
    run, _ = outcomes[layout][rows]
    lines = validations(folder / f"{layout}: {rows}")
    assert [(line["step"], line["set"]) for line in lines] == [(step, None) for step in DUE]
    argv_of = argv(folder, layout, rows, *validation_argv(folder, rows))
    # Weights at the end are those of the last round; the layout itself needs processes.
    argv_of = [word for word in argv_of if not word.startswith("--parallelism.")]
    expected, tokens = direct_loss(run.weights, argv_of, ROWS[rows])
    assert {line["tokens"] for line in lines} == {tokens}
    apart = "documents" in layout or "best_fit" in layout
    assert tokens == ((162 - len(LENGTHS) if apart else 161) if rows == "whole" else 2 * SEQ_LEN)
    assert lines[-1]["loss"] == pytest.approx(expected, abs=2e-6)
    if not apart and layout != "pp 2 in a V, rows by twos":  # which has more layers
        others = validations(folder / f"one: {rows}")
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in others], abs=1e-5)
    assert all(line["seconds"] > 0 for line in lines)


# Going on


GOES_ON = ["--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=6", "--validation.freq=2"]


def through_and_gone_on(world: World, folder: Path, runs: Sequence[tuple[str, list[str]]]) -> list[Outcome]:
    found = []
    for run, words in runs:
        found.append(run_job(world, tiny_argv(folder, *GOES_ON, *words, run=run)))
    return found


def test_a_run_that_goes_on_validates_at_the_same_steps(tmp_path: Path) -> None:
    words = validation_argv(tmp_path, "whole")
    words.remove("--validation.freq=2")
    runs = [("through", [*words, "--training.steps=6"]), ("halves", [*words, "--training.steps=3"])]
    run_ranks(through_and_gone_on, 2, tmp_path, runs)
    first = validations(tmp_path / "halves")
    assert [line["step"] for line in first] == [1, 2, 3]
    shutil.copytree(tmp_path / "halves", tmp_path / "back")
    again = [*words, "--training.steps=6"]
    run_ranks(through_and_gone_on, 3, tmp_path, [("halves", again), ("back", [*again, "--checkpoint.load_step=2"])])
    through, gone_on, back = (validations(tmp_path / run) for run in ("through", "halves", "back"))
    assert [line["step"] for line in through] == [1, 2, 4, 6]
    assert gone_on[:3] == first and [line["step"] for line in gone_on] == [1, 2, 3, 4, 6]
    assert back[:2] == first[:2] and [line["step"] for line in back] == [1, 2, 4, 6]
    for lines in (gone_on, back):
        same = [line["loss"] for line in lines if line["step"] != 3]
        assert same == pytest.approx([line["loss"] for line in through], abs=1e-5)


def test_several_sets_each_have_a_loss(tmp_path: Path) -> None:
    """Those that they have alone."""
    words = validation_argv(tmp_path, "whole")
    one = next(word for word in words if word.startswith("--validation.dataset_path=")).partition("=")[2]
    two = tiny_text(tmp_path)
    rest = [word for word in words if not word.startswith("--validation.dataset")]
    tables = ", ".join(
        f'{{name = "{name}", dataset = "jsonl", dataset_path = "{path}"}}'
        for name, path in (("one", one), ("two", two))
    )
    sets = ["--training.steps=2", f"--validation.sets=[{tables}]", *rest]
    alone = ["--training.steps=2", "--validation.dataset=jsonl", f"--validation.dataset_path={two}", *rest]
    runs = [("sets", sets), ("one", ["--training.steps=2", *words]), ("two", alone)]
    run_ranks(run_jobs, 2, [tiny_argv(tmp_path, *words, run=run) for run, words in runs])
    found, first, second = (validations(tmp_path / run) for run, _ in runs)
    assert [(line["step"], line["set"]) for line in found] == [(1, "one"), (1, "two"), (2, "one"), (2, "two")]
    for name, lines in (("one", first), ("two", second)):
        own = [line for line in found if line["set"] == name]
        assert [line["tokens"] for line in own] == [line["tokens"] for line in lines]
        assert [line["loss"] for line in own] == pytest.approx([line["loss"] for line in lines], abs=1e-6)


def stopped_and_gone_on(world: World, folder: Path, words: list[str]) -> list[Outcome]:
    """A run whose rank 1 is asked to stop in the round after step 2, and the one that goes on."""
    unspied = Evaluator._mean_loss

    def spy(self: Evaluator, batches: int, stop: StopRequest) -> tuple[float, int] | None:
        mean = unspied(self, batches, stop)
        if world.rank == 1 and len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            mean = unspied(self, batches, stop)
        elif len(seen) == 1:
            mean = unspied(self, batches, stop)
        seen.append(mean)
        return mean

    seen: list[Any] = []
    Evaluator._mean_loss = spy  # type: ignore[method-assign]
    stopped = run_job(world, tiny_argv(folder, *words, run="run"))
    assert seen[1:] == [None]
    Evaluator._mean_loss = unspied  # type: ignore[method-assign]
    return [stopped, run_job(world, tiny_argv(folder, *words, run="run"))]


def test_a_run_that_is_asked_to_stop_in_a_round_saves_and_goes_on(tmp_path: Path) -> None:
    words = [*validation_argv(tmp_path, "whole"), "--checkpoint.enable", "--training.steps=4"]
    stopped, resumed = run_ranks(stopped_and_gone_on, 2, tmp_path, words)[0]
    assert not stopped.finished and stopped.steps == [1, 2]
    assert resumed.finished and resumed.steps == [1, 2, 3, 4]
    assert [line["step"] for line in validations(tmp_path / "run")] == [1, 4]
