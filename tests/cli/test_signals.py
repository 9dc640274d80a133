"""How runs of the commands stop when asked to, by a signal or a time limit: with the step ended and saved."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cli.commands import TORCHRUN, end, launched, wait_for_step
from tests.conftest import CHECKOUT
from tests.launch import children_of, run_main, started, started_main, with_descendants
from tests.runs import metrics, tiny_argv
from torchtitan.launch import main as launch_main
from torchtitan.train import main as train_main


def test_a_signal_ends_the_step_saves_and_exits_75(tmp_path: Path) -> None:
    """SIGTERM; of another one, and a single process: test_ends.py, of two runs."""
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable", "--checkpoint.interval=100000")
    workers = ["--training.dataloader.num_workers=1"]
    with launched([*argv, *workers], 2) as process:
        wait_for_step(tmp_path / "run", 3)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    left = end(tmp_path / "run")
    assert (left["reason"], left["exit_code"]) == ("stopped", 75)
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{left['step']}"]
    assert metrics(tmp_path / "run")[-1]["step"] == left["step"]


@contextlib.contextmanager
def running_under_torchrun(argv: list[str], folder: Path, step: int) -> Iterator[subprocess.Popen[str]]:
    """At ``step`` or a later one."""
    with started([*TORCHRUN, *argv], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for_step(folder, step)
        yield process


def test_plain_torchrun_stops_when_everything_or_one_rank_is_signalled_and_goes_on(tmp_path: Path) -> None:
    """Everything, as a scheduler does; torchrun passes it on, so that each rank and loader worker gets it twice."""
    folder = tmp_path / "run"
    argv = tiny_argv(tmp_path, "--checkpoint.enable", "--training.steps=100000")
    with running_under_torchrun([*argv, "--training.dataloader.num_workers=2"], folder, 3) as process:
        everything = with_descendants(process.pid)
        assert len(everything) == 1 + 2 + 4
        for pid in everything:
            os.kill(pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    left = end(folder)
    assert (left["reason"], left["exit_code"]) == ("stopped", 75), output
    assert f"stopped at step {left['step']} after SIGINT" in output
    assert [p.name for p in (folder / "checkpoint").iterdir()] == [f"step-{left['step']}"]

    with running_under_torchrun(argv, folder, left["step"] + 3) as process:
        os.kill(children_of(process.pid)[1], signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    # torchrun signals the others once the first has gone, and would show that as their end.
    assert re.findall(r"exitcode +: (-?\d+)", output) == ["75", "75"]
    assert "after SIGTERM" in output, "rank 0 was not asked, and tells the reason all the same"
    last = end(folder)["step"]
    assert last >= left["step"] + 3
    assert [line["step"] for line in metrics(folder)] == list(range(1, last + 1))
    assert {p.name for p in (folder / "checkpoint").iterdir()} == {f"step-{left['step']}", f"step-{last}"}


def test_the_time_limit_ends_the_run_like_a_signal(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable", "--job.max_duration_minutes=0.02")
    code, printed = run_main(train_main, argv, folder=tmp_path)
    assert code == 75, printed
    assert "max_duration_minutes" in printed


def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow_parts.py").write_text(
        "import time\nfrom torchtitan.loss.losses import LOSSES\n"
        "@LOSSES.register('slow')\ndef slow():\n    open('started', 'w').close()\n    time.sleep(100)\n"
    )
    argv = tiny_argv(tmp_path, "--job.imports=slow_parts", "--loss.name=slow")
    for main, code, said in ((train_main, -signal.SIGTERM, ""), (launch_main, 75, "stopped by SIGTERM before the")):
        started = tmp_path / "started"
        started.unlink(missing_ok=True)
        with started_main(main, argv, folder=tmp_path, NGPU="1", PYTHONPATH=f"{CHECKOUT}:{tmp_path}") as process:
            deadline = time.monotonic() + 60
            while not started.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGTERM)
            process.join(10)
            assert process.exitcode == code
        assert said in (tmp_path / "printed").read_text()
        assert not (tmp_path / "run").exists()


def test_workers_of_a_killed_launcher_save_and_end(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable")
    with launched(argv, 2, output=subprocess.DEVNULL) as process:
        wait_for_step(tmp_path / "run", 3)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (tmp_path / "run" / "end.json").exists():
        time.sleep(0.1)
    left = end(tmp_path / "run")
    assert left["exit_code"] == 75
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{left['step']}"]
