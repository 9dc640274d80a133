"""How runs of the commands end: by an error, a kill, another run; asked to: test_signals.py."""

import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.cli.commands import end, launch, launched, run, wait_for_step
from tests.launch import children_of, with_descendants
from tests.runs import metrics, tiny_argv
from torchtitan.config import ConfigError, load_config
from torchtitan.launch import _ended
from torchtitan.resilience.end import LAUNCHER, End
from torchtitan.train import fail, own_folders

# A part registered from outside: cross entropy that raises on one rank when the third step calls it.
FAULTY_LOSS = """
import os
from torchtitan.loss.losses import LOSSES

@LOSSES.register("faulty")
def faulty(*, at_call: int = 3, on_rank: int = 0):
    calls = 0
    loss = LOSSES.bind("cross_entropy", {}, key="loss")()
    def call(logits, labels):
        nonlocal calls
        calls += 1
        if calls == at_call and int(os.environ.get("RANK", "0")) == on_rank:
            raise RuntimeError("the third step went wrong")
        return loss(logits, labels)
    return call
"""


@pytest.fixture
def faulty(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "faulty_parts.py").write_text(FAULTY_LOSS)
    return {"PYTHONPATH": str(tmp_path)}


def test_an_error_on_one_rank_ends_all_and_is_the_last_thing_shown(tmp_path: Path, faulty: dict[str, str]) -> None:
    rank = 1
    argv = tiny_argv(tmp_path, "--job.imports=faulty_parts", "--loss.name=faulty", f"--loss.on_rank={rank}")
    start = time.perf_counter()
    ended = launch([*argv, "--training.local_batch_size=3"], 2, **faulty)
    assert ended.returncode == 1
    assert time.perf_counter() - start < 60
    assert ended.stderr.strip().splitlines()[-1] == "RuntimeError: the third step went wrong"
    left = end(tmp_path / "run")
    assert (left["reason"], left["exit_code"], left["rank"], left["step"]) == ("failed", 1, rank, 2)


def test_a_killed_rank_is_named_and_takes_all_along(tmp_path: Path) -> None:
    """Of four that hold two stages, each spread over two."""
    layout = ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
    run = ["--training.steps=100000", "--training.dataloader.num_workers=1"]
    with launched(tiny_argv(tmp_path, *run, *layout), 4) as process:
        wait_for_step(tmp_path / "run", 3)
        workers = children_of(process.pid)
        assert len(workers) == 4
        os.kill(workers[3], signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    left = end(tmp_path / "run")
    assert "rank 3 was killed by SIGKILL" in output.strip().splitlines()[-1]
    assert left["rank"] == 3 and left["error"].startswith("killed by SIGKILL")
    deadline = time.monotonic() + 10  # loader workers follow within seconds
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_so_is_a_killed_run_of_one_process(tmp_path: Path) -> None:
    with launched(tiny_argv(tmp_path, "--training.steps=100000"), 1) as process:
        wait_for_step(tmp_path / "run", 1)
        (worker,) = children_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 0 was killed by SIGKILL" in output.strip().splitlines()[-1]
    assert end(tmp_path / "run")["error"].startswith("killed by SIGKILL")


def test_a_run_inside_another_torchrun_has_a_world_of_its_own(tmp_path: Path) -> None:
    ended = launch(tiny_argv(tmp_path, "--training.steps=1"), 1, TORCHELASTIC_USE_AGENT_STORE="True")
    assert ended.returncode == 0, ended.stderr
    assert end(tmp_path / "run")["reason"] == "done"


def test_an_error_that_cannot_be_written_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the rank itself, though its launcher would show it."""
    (tmp_path / "full").write_text("")
    folder = tmp_path / "full" / "run"
    assert End("failed", 1).write(folder) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAUNCHER, "1")
        assert fail(ArithmeticError("is nan"), load_config([f"--job.dump_folder={folder}"]), 2) == 1
    assert "is nan" in capfd.readouterr().err


@pytest.mark.parametrize(("codes", "expected"), [({0: -15}, 75), ({1: -2, 0: -15}, 75), ({0: 3, 1: -15}, 1)])
def test_a_rank_that_is_asked_to_stop_before_the_first_step(
    codes: dict[int, int], expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ended(tmp_path, time.time(), codes) == expected
    assert ("before the first step, with nothing to save" in capsys.readouterr().err) == (expected == 75)


def test_a_process_ends_before_its_interpreter_is_taken_apart() -> None:
    lines = (
        "import atexit, sys",
        "from torchtitan.train import end_process_with",
        "class Late:",
        "    def __del__(self): print('taken apart')",
        "late = Late()",
        "end_process_with(lambda: atexit.register(print, 'at exit') and CODE)",
    )
    for code, expected in (("75", 75), ("1 / 0", 1)):
        ended = run([sys.executable, "-c", "\n".join(lines).replace("CODE", code)])
        assert ended.returncode == expected
        assert ended.stdout == "at exit\n"
        assert ("ZeroDivisionError" in ended.stderr) == (expected == 1)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """And the first, which has nothing to do with the second, still ends as it is asked to."""
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable", "--checkpoint.interval=100000")
    with launched(argv, 1, output=subprocess.DEVNULL) as first:
        wait_for_step(tmp_path / "run", 3)
        assert "libtorch" not in Path(f"/proc/{first.pid}/maps").read_text(), "a launcher of one process needs no torch"
        everything = with_descendants(first.pid)
        for pid in everything:  # it holds its folder, and leaves the processor to the second
            os.kill(pid, signal.SIGSTOP)
        second = launch(argv, 2)
        assert second.returncode == 2
        assert "another run is writing to" in second.stderr + second.stdout
        assert not (tmp_path / "run" / "end.json").exists()
        for pid in everything:
            os.kill(pid, signal.SIGCONT)
        first.send_signal(signal.SIGUSR1)
        first.wait(60)
    assert first.returncode == 75
    left = end(tmp_path / "run")
    assert (left["reason"], left["exit_code"]) == ("stopped", 75)
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{left['step']}"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 1 + left["step"]))


def test_two_runs_do_not_share_a_folder_of_steps(tmp_path: Path) -> None:
    def owned(run: str, *overrides: str) -> AbstractContextManager[None]:
        words = ["--checkpoint.enable", f"--checkpoint.folder={tmp_path / 'steps'}", *overrides]
        return own_folders(load_config([f"--job.dump_folder={tmp_path / run}", *words]))

    refused = pytest.raises(ConfigError, match=r"^checkpoint.folder: another run")
    with owned("a"), owned("b", "--checkpoint.load_only"), refused, owned("c"):
        pass
    with owned("c"), owned("d", "--checkpoint.folder=."):
        pass
