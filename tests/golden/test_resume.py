"""A run that stopped and went on equals one that did not: to the bit on as many ranks, within 1e-5 on others."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.launch import run_ranks
from tests.runs import Outcome, run_job, run_jobs, tiny_argv

SAVES = ["--checkpoint.enable", "--checkpoint.interval=5", "--lr_scheduler.total_steps=20"]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder with a run on two ranks that ended after ten steps of twenty, and the run that went through."""
    folder = tmp_path_factory.mktemp("resume")
    through, first = run_ranks(
        run_jobs,
        2,
        [tiny_argv(folder, *SAVES, run="through"), tiny_argv(folder, *SAVES, "--training.steps=10", run="half")],
    )[0]
    assert first.losses == through.losses[:10]
    return folder, through


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_resumed_run_is_the_uninterrupted_one(half: tuple[Path, Outcome], ranks: int) -> None:
    folder, through = half
    shutil.copytree(folder / "half", folder / f"on-{ranks}")
    resumed = run_ranks(run_job, ranks, tiny_argv(folder, *SAVES, run=f"on-{ranks}"))[0]
    assert resumed.finished
    assert resumed.steps == list(range(1, 21))  # ten old lines, then the step after the loaded one
    assert resumed.rows == through.rows[10:]
    assert resumed.rates == through.rates
    assert resumed.tokens_seen == through.tokens_seen
    if ranks == 2:
        assert resumed.losses == through.losses
        assert resumed.norms == through.norms
        for name, weight in through.weights.items():
            assert torch.equal(resumed.weights[name], weight), name
    else:
        assert resumed.losses == pytest.approx(through.losses, abs=1e-5)
        assert resumed.norms == pytest.approx(through.norms, rel=1e-4)


TIED = ["--model.args.tie_word_embeddings", "--model.args.n_layers=4", "--training.steps=8"]
SPLIT = {
    "one rank": [],
    "shard 2 × tensor 2": ["--parallelism.tensor_parallel_degree=2"],
    "tensor 2 × pipeline 2": [
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
        "--training.local_batch_size=6",
    ],
    "pipeline 2 in a V": [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        "--training.local_batch_size=6",
    ],
}


@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks_after"),
    [
        ("tensor 2 × pipeline 2", 4, "pipeline 2 in a V", 2),
        ("pipeline 2 in a V", 2, "shard 2 × tensor 2", 4),
        ("one rank", 1, "tensor 2 × pipeline 2", 4),
    ],
)
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, before: str, ranks_before: int, after: str, ranks_after: int
) -> None:
    """Tied weights too, of which a pipeline has two copies with states of their own."""
    saves = [*SAVES, *TIED]
    through = run_ranks(run_job, 1, tiny_argv(tmp_path, *saves, run="through"))[0]
    run_ranks(run_job, ranks_before, tiny_argv(tmp_path, *saves, "--training.steps=4", *SPLIT[before]))
    resumed = run_ranks(run_job, ranks_after, tiny_argv(tmp_path, *saves, *SPLIT[after]))[0]
    assert resumed.steps == list(range(1, 9)) and resumed.rows == through.rows[4:]
    assert resumed.losses == pytest.approx(through.losses, abs=1e-5)
    assert resumed.norms == pytest.approx(through.norms, rel=1e-4)


def test_rows_do_not_depend_on_workers_or_local_batch(half: tuple[Path, Outcome]) -> None:
    folder, through = half
    others = [
        tiny_argv(folder, *extra, "--training.steps=6", "--lr_scheduler.total_steps=20", run=f"rows-{n}")
        for n, extra in enumerate(
            [
                ["--training.dataloader.num_workers=2"],
                ["--training.local_batch_size=1"],
                ["--training.dataloader.num_workers=1", "--training.local_batch_size=4"],
            ]
        )
    ]
    for outcome in run_ranks(run_jobs, 1, others)[0]:
        assert outcome.rows == through.rows[:6]
        assert outcome.losses == pytest.approx(through.losses[:6], abs=1e-5)


def test_the_same_command_twice_gives_the_same_bits(half: tuple[Path, Outcome]) -> None:
    folder, _ = half
    argvs = [
        tiny_argv(
            folder,
            "--debug.deterministic",
            "--training.steps=5",
            "--training.mixed_precision_param=bfloat16",
            run=f"twice-{n}",
        )
        for n in range(2)
    ]
    first, second = run_ranks(run_jobs, 2, argvs)[0]
    assert first.losses == second.losses
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_a_resume_keeps_the_global_batch_that_followed_from_the_ranks(tmp_path: Path) -> None:
    unset = [*SAVES, "--training.global_batch_size=-1", "--training.local_batch_size=2"]
    first = run_ranks(run_job, 3, tiny_argv(tmp_path, *unset, "--training.steps=5"))[0]
    second = run_ranks(run_job, 1, tiny_argv(tmp_path, *unset, "--training.steps=7"))[0]
    assert [len(rows) for rows in first.rows] == [6] * 5
    assert [len(rows) for rows in second.rows] == [6] * 2
    assert second.tokens_seen == [6 * 48 * step for step in range(1, 8)]


def test_excluded_parts_start_anew(half: tuple[Path, Outcome]) -> None:
    folder, through = half
    argvs = []
    for n, part in enumerate(["dataloader", "lr_scheduler", "optimizer", "train_state"]):
        shutil.copytree(folder / "half", folder / f"without-{n}")
        argvs.append(
            tiny_argv(
                folder, *SAVES, f"--checkpoint.exclude_from_loading={part}", "--training.steps=12", run=f"without-{n}"
            )
        )
    data, schedule, optimizer, state = run_ranks(run_jobs, 2, argvs)[0]
    assert data.rows == through.rows[:2]
    assert schedule.rows == through.rows[10:12]
    assert schedule.rates[10:] == through.rates[:2]
    assert optimizer.losses[10] == through.losses[10]
    assert optimizer.losses[11] != through.losses[11]
    assert state.steps == list(range(1, 13))
    assert state.rows[0] == through.rows[10]
