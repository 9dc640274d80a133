"""Saving and loading through the real trainer when disks fill, files rot and models change."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.launch import RanksFailed, run_ranks
from tests.runs import Outcome, run_job, run_jobs, tiny_argv
from torchtitan.checkpoint.manifest import FORMAT, Manifest
from torchtitan.checkpoint.places import RecordedFile
from torchtitan.checkpoint.storage import StepFolders
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.resolve.job import resolve_job

SAVES = ["--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=20"]


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder with a run of six steps on two ranks, saved every second one, and what it did."""
    folder = tmp_path_factory.mktemp("six")
    return folder, run_ranks(run_job, 2, tiny_argv(folder, *SAVES, "--training.steps=6"))[0]


def copy(six: tuple[Path, Outcome], tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(six[0], folder)
    return folder / "run" / "checkpoint"


def go_on(checkpoints: Path, *overrides: str, ranks: int = 2, steps: int = 8) -> Outcome:
    argv = tiny_argv(checkpoints.parents[1], *SAVES, f"--training.steps={steps}", *overrides)
    return run_ranks(run_job, ranks, argv)[0]


def test_keys_are_flat_and_named_like_the_model(six: tuple[Path, Outcome]) -> None:
    folder = six[0] / "run" / "checkpoint" / "step-6"
    keys = set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    names = set(six[1].weights)
    assert {k for k in keys if not k.startswith("optimizer.")} == names
    assert {k for k in keys if k.startswith("optimizer.")} == {
        f"optimizer.state.{name}.{state}" for name in names for state in ("exp_avg", "exp_avg_sq", "step")
    }
    manifest = Manifest.read(folder)
    assert set(manifest.files) == {".metadata", "config.toml", "__0_0.distcp", "__1_0.distcp"}
    assert manifest.state["train_state"] == {"step": 6, "tokens_seen": 6 * 6 * 48, "global_batch_size": 6}
    assert manifest.state["dataloader"]["next_row"] == 36


def test_nothing_of_ours_is_pickled(six: tuple[Path, Outcome]) -> None:
    metadata = dcp.FileSystemReader(six[0] / "run" / "checkpoint" / "step-6").read_metadata()
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "config.toml", "manifest.json"])
def test_a_damaged_step_is_named_and_the_one_before_it_taken(
    six: tuple[Path, Outcome], tmp_path: Path, name: str
) -> None:
    checkpoints = copy(six, tmp_path)
    path = checkpoints / "step-6" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    outcome = go_on(checkpoints)
    assert outcome.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert outcome.losses[4:6] == six[1].losses[4:6]
    with pytest.raises(RanksFailed, match=f"CheckpointError.*{name}"):
        checkpoints_again = copy(six, tmp_path / "again")
        (checkpoints_again / "step-6" / name).write_bytes(content)
        go_on(checkpoints_again, "--checkpoint.load_step=6")


def test_when_every_step_is_damaged_nothing_is_started_anew(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    for step in (2, 4, 6):
        with (checkpoints / f"step-{step}" / "__0_0.distcp").open("r+b") as file:
            file.truncate(100)
    with pytest.raises(RanksFailed, match=r"every step in .* is damaged"):
        go_on(checkpoints)
    assert {p.name for p in checkpoints.iterdir()} == {"step-2", "step-4", "step-6"}


def test_a_newer_format_is_no_damage(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    path = checkpoints / "step-6" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1}))
    with pytest.raises(RanksFailed, match=rf"step-6 has format {FORMAT + 1}.*update torchtitan"):
        go_on(checkpoints)
    assert {p.name for p in checkpoints.iterdir()} == {"step-2", "step-4", "step-6"}


def test_a_half_written_step_is_never_taken(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    (checkpoints / "step-6").rename(checkpoints / "step-8.partial")
    shutil.copytree(checkpoints / "step-4", checkpoints / "step-7")
    (checkpoints / "step-7" / "manifest.json").unlink()
    outcome = go_on(checkpoints, steps=6)
    assert outcome.losses[4:] == six[1].losses[4:]
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-2", "step-4", "step-6", "step-7"]


def test_a_renamed_step_is_passed_over(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-500")
    assert go_on(checkpoints).steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {p.name for p in checkpoints.iterdir()} >= {"step-6", "step-8", "step-500.superseded"}


def test_going_back_by_number(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    outcome = go_on(checkpoints, "--checkpoint.load_step=2", steps=3)
    assert outcome.steps == [1, 2, 3]
    assert outcome.losses == six[1].losses[:3]
    names = {p.name for p in checkpoints.iterdir()}
    assert names == {"step-2", "step-3", "step-4.superseded", "step-6.superseded"}
    with pytest.raises(RanksFailed, match=r"checkpoint.load_step.*there are: 2, 3"):
        go_on(checkpoints, "--checkpoint.load_step=5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.args.n_layers=3"], "model.args.n_layers: was 2 when the checkpoint was saved"),
        (["--model.args.n_heads=2"], "model.args.n_heads: was 4"),
        (["--model.args.tie_word_embeddings=true"], "model.args.tie_word_embeddings: was False"),
        (["--optimizer.name=Adam"], "optimizer.name: the checkpoint holds the states of AdamW"),
        (["--training.dtype=bfloat16"], "training.dtype: .* holds float32"),
        (["--training.seq_len=32"], "training.dataset.*exclude_from_loading"),
        (["--data.shuffle=false"], "training.dataset.*exclude_from_loading"),
    ],
)
def test_what_does_not_fit_is_refused(
    six: tuple[Path, Outcome], tmp_path: Path, overrides: list[str], message: str
) -> None:
    checkpoints = copy(six, tmp_path)
    with pytest.raises(RanksFailed, match=message):
        go_on(checkpoints, *overrides)
    assert {p.name for p in checkpoints.iterdir()} == {"step-2", "step-4", "step-6"}


def test_initial_weights_and_whole_starts(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    source = six[0] / "run"
    # An empty checkpoint folder of one's own does not hide the weights to start from.
    (tmp_path / "weights" / "checkpoint").mkdir(parents=True)
    start = [f"--checkpoint.initial_load_path={source}", "--training.steps=2"]
    whole = [
        f"--checkpoint.initial_load_path={source}",
        "--checkpoint.initial_load_model_only=false",
        "--training.steps=8",
    ]
    weights, everything = run_ranks(
        run_jobs,
        2,
        [tiny_argv(tmp_path, *SAVES, *start, run="weights"), tiny_argv(tmp_path, *SAVES, *whole, run="whole")],
    )[0]
    assert weights.steps == [1, 2]
    assert weights.losses[0] < six[1].losses[0]  # trained weights
    assert weights.rows[0] == six[1].rows[0]  # but the data from their first row
    assert everything.steps == [7, 8]
    with pytest.raises(RanksFailed, match=r"checkpoint.initial_load_path: no checkpoint there"):
        run_ranks(
            run_job, 1, tiny_argv(tmp_path, *SAVES, f"--checkpoint.initial_load_path={tmp_path / 'empty'}", run="x")
        )


def test_load_only_never_writes(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in checkpoints.rglob("*")}
    assert go_on(checkpoints, "--checkpoint.load_only").steps[-1] == 8
    assert {p: p.stat().st_mtime_ns for p in checkpoints.rglob("*")} == before


def test_saves_when_asked_and_keeps_the_newest(tmp_path: Path) -> None:
    argv = tiny_argv(
        tmp_path,
        *SAVES,
        "--training.steps=9",
        "--checkpoint.enable_first_step_checkpoint",
        "--checkpoint.keep_latest_k=3",
    )
    run_ranks(run_job, 1, argv)
    assert {p.name for p in (tmp_path / "run" / "checkpoint").iterdir()} == {"step-6", "step-8", "step-9"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.args.n_layers=3"], r"holds no layers\.2\."),
        (["--model.args.n_layers=1"], r"holds layers\.1\..*, which the model has not"),
        (["--model.args.tie_word_embeddings=true"], r"holds output.weight, which the model has not"),
        (["--model.args.vocab_size=302"], r"holds tok_embeddings.weight as \[301, 32\], the model wants \[302, 32\]"),
    ],
)
def test_weights_of_another_model_are_refused(
    six: tuple[Path, Outcome], tmp_path: Path, overrides: list[str], message: str
) -> None:
    start = f"--checkpoint.initial_load_path={six[0] / 'run'}"
    with pytest.raises(ConfigError, match=r"when the checkpoint was saved") as refused:  # by its manifest, at once
        resolve_job(load_config(tiny_argv(tmp_path, *SAVES, start, *overrides)), 1)
    assert f"--{refused.value.key}=" == overrides[0].partition("=")[0] + "="
    shutil.copytree(six[0] / "run" / "checkpoint" / "step-6", tmp_path / "bare")
    (tmp_path / "bare" / "manifest.json").unlink()  # and by its tensors, where there is none
    start = f"--checkpoint.initial_load_path={tmp_path / 'bare'}"
    with pytest.raises(RanksFailed, match=message):
        run_ranks(run_job, 1, tiny_argv(tmp_path, *SAVES, start, *overrides))


def test_rates_and_factors_may_change_on_purpose(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    assert go_on(checkpoints, "--model.args.rope_theta=1e6", "--optimizer.lr=1e-4").steps[-1] == 8


def test_steps_of_another_program_are_neither_taken_nor_deleted(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    for step in (2, 4, 6):
        (checkpoints / f"step-{step}" / "manifest.json").unlink()
    before = sorted(checkpoints.rglob("*"))
    with pytest.raises(RanksFailed, match=r"checkpoint.folder: .*step-6 was written by another program"):
        go_on(checkpoints)
    assert sorted(checkpoints.rglob("*")) == before


def test_a_restart_does_not_go_back_a_second_time(six: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoints = copy(six, tmp_path)
    back = ["--checkpoint.load_step=2", "--checkpoint.exclude_from_loading=dataloader,lr_scheduler"]
    first = go_on(checkpoints, *back, steps=5)
    assert first.rows == six[1].rows[:3]
    again = go_on(checkpoints, *back, steps=7)
    assert again.steps == [1, 2, 3, 4, 5, 6, 7]
    assert again.rows == six[1].rows[3:5]  # the data went on, and the schedule
    assert again.rates[2:] == six[1].rates[:5]


def test_starting_from_zero_in_the_same_folder_keeps_the_old_steps_aside(
    six: tuple[Path, Outcome], tmp_path: Path
) -> None:
    checkpoints = copy(six, tmp_path)
    go_on(checkpoints, "--checkpoint.exclude_from_loading=train_state", "--checkpoint.keep_latest_k=2", steps=5)
    names = {p.name for p in checkpoints.iterdir()}
    assert names == {"step-4", "step-5", *(f"step-{n}.superseded" for n in (2, 4, 6))}


class FailingFile:
    """A file of which the n-th call of one kind fails."""

    def __init__(self, file: Any, kind: str, n: int) -> None:
        self._file, self._kind, self._left = file, kind, n

    def __getattr__(self, name: str) -> Any:
        if name == self._kind:
            self._left -= 1
            if not self._left:
                raise OSError(errno.ENOSPC, "No space left on device")
        return getattr(self._file, name)


def disk_full_at(world: World, argv: list[str], full: list[int], kind: str, n: int) -> Outcome:
    """Run with a disk that is full on the last rank while the steps ``full`` are saved."""
    open_file = RecordedFile.open

    def opened(self: RecordedFile) -> Any:
        failing = world.rank == world.size - 1 and self.path.parent.name in {f"step-{step}.partial" for step in full}
        return FailingFile(open_file(self), kind, n) if failing else open_file(self)

    with mock.patch.object(RecordedFile, "open", opened):
        return run_job(world, argv)


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("kind", "n"), [("write", 1), ("write", 40), ("flush", 1), ("close", 1)])
def test_a_full_disk_costs_one_save_and_nothing_else(
    six: tuple[Path, Outcome], tmp_path: Path, kind: str, n: int, mode: str
) -> None:
    """Wherever it comes, in the middle of a tensor too, where torch makes something else of the error."""
    argv = tiny_argv(tmp_path, *SAVES, "--training.steps=6", f"--checkpoint.async_mode={mode}")
    outcome = run_ranks(disk_full_at, 2, argv, [4], kind, n)[0]
    assert outcome.losses == six[1].losses
    assert {p.name for p in (tmp_path / "run" / "checkpoint").iterdir()} == {"step-2", "step-6"}
    if (kind, n) == ("write", 1):
        with pytest.raises(RanksFailed, match=r"step 8 could not be saved .* No space left"):
            run_ranks(disk_full_at, 2, [*argv, "--training.steps=8"], [8], kind, n)
        assert {p.name for p in (tmp_path / "run" / "checkpoint").iterdir()} == {"step-2", "step-6"}


def poisoned(world: World, argv: list[str], at: int) -> tuple[str, bool, int]:
    """A NaN in one rank's gradient at one step: the error, whether weights stayed as they were, and the step."""
    from torchtitan.config import load_config
    from torchtitan.resilience.guard import StopRequest
    from torchtitan.resolve.job import resolve_job
    from torchtitan.trainer import NonFiniteError, Trainer

    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    before: list[torch.Tensor] = []
    forward_backward = trainer.runner.forward_backward

    def poison(batch: Any, num_valid: float) -> torch.Tensor:
        loss = forward_backward(batch, num_valid)
        if trainer.state.step + 1 == at:
            before[:] = [p.to_local().clone() for p in trainer.parameters]
            if world.rank == world.size - 1:
                trainer.parameters[0].grad.to_local().view(-1)[0] = float("nan")  # type: ignore[union-attr]
        return loss

    trainer.runner.forward_backward = poison  # type: ignore[method-assign]
    try:
        trainer.run(StopRequest())
    except NonFiniteError as error:
        same = all(torch.equal(p.to_local(), old) for p, old in zip(trainer.parameters, before, strict=True))
        return str(error), same, trainer.state.step
    raise AssertionError("the poisoned step went through")


def test_a_nan_on_one_rank_stops_all_before_the_update(tmp_path: Path) -> None:
    for error, unchanged, step in run_ranks(poisoned, 2, tiny_argv(tmp_path, *SAVES, "--metrics.log_freq=100"), 3):
        assert "step 3" in error and unchanged and step == 2
    assert {p.name for p in (tmp_path / "run" / "checkpoint").iterdir()} == {"step-2"}


def stubborn(world: World, argv: list[str]) -> str:
    """Start in a folder that rank 0 may not put in order."""
    with mock.patch.object(StepFolders, "recover", side_effect=PermissionError("not yours")):
        try:
            run_job(world, argv)
        except CheckpointError as error:
            return str(error)
    return "went on"


def test_all_ranks_are_told_of_what_rank_0_may_not_do(tmp_path: Path) -> None:
    for told in run_ranks(stubborn, 2, tiny_argv(tmp_path, *SAVES), timeout=60):
        assert told.endswith("cannot be put in order: not yours")
