"""Runs on a blend of data sets: the same rows in every layout, each source's rows in order, through every stage."""

import json
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.runs import Outcome, metrics, run_job, run_jobs, tiny_argv

SAVES = ["--checkpoint.enable", "--checkpoint.interval=4", "--lr_scheduler.total_steps=12", "--training.steps=12"]
WIKI, CODE, BOOKS = (
    f"dataset = 'jsonl', dataset_path = '{{folder}}/{name}.jsonl'" for name in ("wiki", "code", "books")
)
FIRST = f"{{{{{WIKI}, weight = 0.7}}}}, {{{{{CODE}, weight = 0.3}}}}"
SECOND = f"{{{{{CODE}, weight = 0.5, from_step = 6}}}}, {{{{{BOOKS}, weight = 0.5, from_step = 6}}}}"


def argv(folder: Path, *overrides: str, sources: str = f"{FIRST}, {SECOND}", run: str = "run") -> list[str]:
    own = [word for word in tiny_argv(folder, run=run) if not word.startswith("--training.dataset")]
    return [*own, f"--data.sources=[{sources.format(folder=folder)}]", *SAVES, *overrides]


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder with three data sets, of which two are read more than once, and a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("blend")
    for name, lines in (("wiki", 8), ("code", 40), ("books", 6)):
        (folder / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": f"{name} {i} " * 12}) for i in range(lines))
        )
    return folder, run_ranks(run_job, 2, argv(folder, run="through"))[0]


def test_rows_do_not_depend_on_ranks_or_workers(through: tuple[Path, Outcome]) -> None:
    folder, outcome = through
    assert len({row for rows in outcome.rows for row in rows}) < 72 == sum(map(len, outcome.rows))
    for ranks, others in (
        (1, ["--training.dataloader.num_workers=2"]),
        (3, []),
        (4, ["--training.local_batch_size=1"]),
    ):
        other = run_ranks(run_job, ranks, argv(folder, *others, "--training.steps=8", run=f"on-{ranks}"))[0]
        assert other.rows == outcome.rows[:8]
        assert other.losses == pytest.approx(outcome.losses[:8], abs=1e-5)


def test_it_goes_on_with_the_next_row_of_each_source(through: tuple[Path, Outcome]) -> None:
    """Twice in a row, over the step at which the blend changes, on other numbers of ranks."""
    folder, outcome = through
    run_ranks(run_job, 4, argv(folder, "--training.steps=4"))
    run_ranks(run_job, 3, argv(folder, "--training.steps=7"))
    resumed = run_ranks(run_job, 1, argv(folder))[0]
    assert resumed.steps == list(range(1, 13)) and resumed.rows == outcome.rows[7:]
    assert resumed.losses == pytest.approx(outcome.losses, abs=1e-5)


def test_metrics_count_the_tokens_of_each_source(through: tuple[Path, Outcome]) -> None:
    folder, _ = through
    lines = metrics(folder / "through")
    for line in lines:
        tokens = {name: line[f"source_tokens/{name}"] for name in ("wiki", "code", "books")}
        assert sum(tokens.values()) == line["tokens_seen"]
        assert line["step"] > 5 or (tokens["books"] == 0 and abs(tokens["wiki"] / 48 - 0.7 * 6 * line["step"]) < 2)
    assert lines[4]["source_tokens/wiki"] == lines[-1]["source_tokens/wiki"] > 0


def test_a_blend_may_be_changed_from_a_later_step_on(through: tuple[Path, Outcome]) -> None:
    folder, outcome = through
    changed = argv(folder, run="changed", sources=FIRST)
    run_ranks(run_job, 1, [*changed, "--training.steps=4"])
    with pytest.raises(AssertionError, match=r"data.sources\[2\].from_step: is not after step 4"):
        run_ranks(run_job, 1, argv(folder, run="changed", sources=f"{FIRST}, {SECOND.replace('= 6', '= 3')}"))
    with pytest.raises(AssertionError, match=r"data.sources: the data, .* means nothing"):
        run_ranks(run_job, 1, argv(folder, run="changed", sources=f"{FIRST.replace('0.7', '0.6')}, {SECOND}"))
    assert run_ranks(run_job, 1, argv(folder, run="changed"))[0].rows == outcome.rows[4:]


def test_a_source_is_not_read_more_often_than_it_may_be(through: tuple[Path, Outcome]) -> None:
    folder, _ = through
    with pytest.raises(AssertionError, match=r"data.max_epochs: \w+ has \d+ rows an epoch, and the last step would"):
        run_ranks(run_job, 1, argv(folder, "--data.max_epochs=1", run="once"))
    enough, _ = run_ranks(run_jobs, 1, [argv(folder, f"--data.max_epochs={n}", run=f"{n}") for n in (20, 30)])[0]
    assert enough.finished
