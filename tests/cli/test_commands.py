"""The commands as users type them: what they print, how fast, and how they end."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.launch import children_of, run_command, started, with_descendants
from tests.runs import metrics, tiny_argv
from torchtitan.config import ConfigError, load_config
from torchtitan.log import logger
from torchtitan.train import main as train_main
from torchtitan.train import own_folders

TRAIN = [sys.executable, "-m", "torchtitan.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "torchtitan.train"]

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


def run(command: list[str], *, timeout: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(command, timeout=timeout, cwd=CHECKOUT, env={**os.environ, **environment})


def launch(argv: list[str], ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["./run_train.sh", *argv], NGPU=str(ranks), **_on_path(environment))


def _on_path(environment: dict[str, str]) -> dict[str, str]:
    """run_train.sh calls plain `python`, which must be the one that runs the tests."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}


@pytest.fixture
def faulty(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "faulty_parts.py").write_text(FAULTY_LOSS)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def _process_as_it_was() -> Iterator[None]:
    """The command run inside the tests' own process leaves its log and its signals as they were."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    log = logger.handlers[:], logger.level, logger.propagate
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.handlers[:], logger.level, logger.propagate = log


def end(folder: Path) -> dict[str, object]:
    return json.loads((folder / "end.json").read_text())


def best_seconds(command: list[str], tries: int = 3) -> float:
    """What a command takes of a processor: on a machine with nothing else to do, that is how long it takes."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(tries):
        start = spent()
        run(command)
        times.append(spent() - start)
    return min(times)


def test_help_and_mistyped_keys_take_less_than_a_second() -> None:
    shown = run([*TRAIN, "--help"])
    assert shown.returncode == 0
    for key in (
        "training.steps",
        "optimizer.beta1",
        "lr_scheduler.decay_ratio",
        "parallelism.data_parallel_shard_degree",
    ):
        assert key in shown.stdout
    assert best_seconds([*TRAIN, "--help"]) < 1.0
    command = " ".join([*TRAIN, "--help"])
    begun = subprocess.run(["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"], capture_output=True, text=True)
    assert (begun.returncode, begun.stderr) == (0, "") and begun.stdout.count("\n") == 1

    typo = run([*TRAIN, "--training.step", "5"])
    assert typo.returncode == 2
    assert typo.stderr.strip().splitlines() == [typo.stderr.strip()]
    assert "training.step" in typo.stderr and "did you mean training.steps" in typo.stderr
    assert "command line" in typo.stderr
    assert best_seconds([*TRAIN, "--training.step", "5"]) < 1.0


def test_version() -> None:
    import torchtitan

    assert run([*TRAIN, "--version"]).stdout.strip() == f"torchtitan {torchtitan.__version__}"


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        (["--optimizer.beta_1=0.9"], ["optimizer.beta_1", "beta1"]),
        (["--optimizer.beta1=1.5"], ["optimizer.beta1", "1.5", "command line"]),
        (["--optimizer.name=Adamw"], ["optimizer.name", "AdamW"]),
        (["--model.flavor=8b"], ["model.flavor", "8B"]),
        (["--model.name=llama"], ["model.name", "llama3"]),
        (["--model.args.n_head=4"], ["model.args.n_head", "n_heads"]),
        (["--model.args.n_kv_heads=3"], ["model.args.n_kv_heads", "does not divide n_heads=16"]),
        (["--model.args.dim=abc"], ["model.args.dim", "integer"]),
        (["--parallelism.data_parallel_shard_degree=3"], ["data_parallel_shard_degree", "3", "1 process"]),
        (["--parallelism.data_parallel_replicate_degree=2"], ["data_parallel_replicate_degree", "start 2"]),
        (
            ["--training.dataset=text", "--training.dataset_path=/no/such/file"],
            ["training.dataset_path", "/no/such/file"],
        ),
        (["--training.dataset=jsonl"], ["training.dataset_path"]),
        (["--training.dataset=wikipedia"], ["training.dataset", "python_docs"]),
        (["--model.args.vocab_size=100"], ["model.args.vocab_size", "2048"]),
        (["--tokenizer.name=bytes"], ["data.add_bos", "data.bos_id"]),
        (["--model.hf_assets_path=/no/tokenizer"], ["model.hf_assets_path", "/no/tokenizer"]),
        (["--optimizer.weight_decay_exclude=*bias"], ["optimizer.weight_decay_exclude", "*bias"]),
        (["--model.converters=quantize.linear.float9"], ["model.converters"]),
        (["--metrics.sinks=carrier_pigeon"], ["metrics.sinks", "console"]),
        (["--job.dump_folder=/proc/here"], ["job.dump_folder", "cannot be written to"]),
        (["--job.imports=no_such_module"], ["job.imports", "no_such_module"]),
        (["--parallelism.tensor_parallel_degree=2"], ["parallelism.tensor_parallel_degree", "start 2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value[0].startswith("--") else "",
)
@pytest.mark.usefixtures("_process_as_it_was")
def test_mistakes_are_told_in_one_line_before_anything_starts(
    argv: list[str], fragments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = [] if any("dump_folder" in word for word in argv) else [f"--job.dump_folder={tmp_path / 'run'}"]
    assert train_main([*folder, *argv]) == 2
    error = capfd.readouterr().err.strip()
    assert len(error.splitlines()) == 1, error
    for fragment in fragments:
        assert fragment in error
    assert not (tmp_path / "run").exists()


def test_what_needs_the_model_is_told_within_six_seconds() -> None:
    command = [*TRAIN, "--model.args.n_kv_heads=3"]
    assert "does not divide n_heads=16" in run(command).stderr
    assert best_seconds(command) < 6.0


def test_a_run_leaves_what_the_documents_promise_and_is_not_run_twice(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=4", "--checkpoint.enable", "--metrics.enable_tensorboard")
    first = launch(argv, 2)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {"config.toml", "metrics.jsonl", "end.json", "checkpoint", "tb"}
    assert end(folder) == {"reason": "done", "exit_code": 0, "step": 4, "error": None, "rank": None}
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert [p.name for p in (folder / "checkpoint").iterdir()] == ["step-4"]

    (folder / "end.json").unlink()  # as if killed after the last save
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    again = launch(argv, 2)
    assert again.returncode == 0
    assert "nothing left to do" in again.stderr + again.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before

    # The configuration it left is the run's: more steps go on from there.
    more = run([*TRAIN, f"--job.config_file={folder / 'config.toml'}", "--training.steps=6"])
    assert more.returncode == 0, more.stderr
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_wrong_key_stops_the_launcher(tmp_path: Path) -> None:
    ended = launch(tiny_argv(tmp_path, "--training.step=4"), 2)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_and_is_the_last_thing_shown(
    tmp_path: Path, faulty: dict[str, str], rank: int
) -> None:
    argv = tiny_argv(tmp_path, "--job.imports=faulty_parts", "--loss.name=faulty", f"--loss.on_rank={rank}")
    start = time.perf_counter()
    ended = launch([*argv, "--training.local_batch_size=3"], 2, **faulty)
    assert ended.returncode == 1
    assert time.perf_counter() - start < 60
    assert ended.stderr.strip().splitlines()[-1] == "RuntimeError: the third step went wrong"
    left = end(tmp_path / "run")
    assert (left["reason"], left["exit_code"], left["rank"], left["step"]) == ("failed", 1, rank, 2)


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 1), (signal.SIGINT, 2)], ids=["TERM", "USR1", "INT"]
)
def test_a_signal_ends_the_step_saves_and_exits_75(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable", "--checkpoint.interval=100000")
    workers = ["--training.dataloader.num_workers=1"]
    environment = {**os.environ, **_on_path({"NGPU": str(ranks)})}
    with started(
        ["./run_train.sh", *argv, *workers],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        wait_for_step(tmp_path / "run", 3)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    left = end(tmp_path / "run")
    assert (left["reason"], left["exit_code"]) == ("stopped", 75)
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{left['step']}"]
    assert metrics(tmp_path / "run")[-1]["step"] == left["step"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, 1)], ids=["TERM", "KILL"])
def test_what_happens_to_one_rank_happens_to_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Of four that hold two stages, each spread over two."""
    layout = ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
    run = ["--training.steps=100000", "--checkpoint.enable", "--training.dataloader.num_workers=1"]
    environment = {**os.environ, **_on_path({"NGPU": "4"})}
    with started(
        ["./run_train.sh", *tiny_argv(tmp_path, *run, *layout)],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        wait_for_step(tmp_path / "run", 3)
        workers = children_of(process.pid)
        assert len(workers) == 4
        os.kill(workers[3], number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    left = end(tmp_path / "run")
    if code == 1:
        assert "rank 3 was killed by SIGKILL" in output.strip().splitlines()[-1]
        assert left["rank"] == 3 and left["error"].startswith("killed by SIGKILL")
    else:
        assert left["exit_code"] == code
        assert "after SIGTERM" in output, "rank 0 was not asked, and tells the reason all the same"
    if code == 75:
        assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{left['step']}"]
    deadline = time.monotonic() + 10  # loader workers follow within seconds
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@contextlib.contextmanager
def running_under_torchrun(argv: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """At its third step or a later one."""
    with started([*TORCHRUN, *argv], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for_step(folder, 3)
        yield process


def test_plain_torchrun_stops_when_everything_is_signalled_and_goes_on(tmp_path: Path) -> None:
    """As a scheduler does; torchrun passes it on, so that each rank and loader worker gets it twice."""
    folder = tmp_path / "run"
    argv = tiny_argv(tmp_path, "--checkpoint.enable", "--training.dataloader.num_workers=2")
    with running_under_torchrun([*argv, "--training.steps=100000"], folder) as process:
        everything = with_descendants(process.pid)
        assert len(everything) == 1 + 2 + 4
        for pid in everything:
            os.kill(pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    left = end(folder)
    assert (left["reason"], left["exit_code"]) == ("stopped", 75), output
    assert f"stopped at step {left['step']} after SIGINT" in output
    assert [p.name for p in (folder / "checkpoint").iterdir()] == [f"step-{left['step']}"]

    again = run([*TORCHRUN, *argv, f"--training.steps={left['step'] + 2}"])
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in metrics(folder)] == list(range(1, left["step"] + 3))
    assert end(folder)["reason"] == "done"


def test_all_ranks_end_with_75_when_one_is_signalled(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--checkpoint.enable", "--training.steps=100000")
    with running_under_torchrun(argv, tmp_path / "run") as process:
        os.kill(children_of(process.pid)[1], signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    # torchrun signals the others once the first has gone, and would show that as their end.
    assert re.findall(r"exitcode +: (-?\d+)", output) == ["75", "75"]
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{end(tmp_path / 'run')['step']}"]


def wait_for_step(folder: Path, step: int, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in {seconds} s")


def test_the_time_limit_ends_the_run_like_a_signal(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable", "--job.max_duration_minutes=0.1")
    ended = run([*TRAIN, *argv])
    assert ended.returncode == 75, ended.stderr
    assert "max_duration_minutes" in ended.stderr


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=100000")
    environment = {**os.environ, **_on_path({"NGPU": "1"})}
    with started(
        ["./run_train.sh", *argv], cwd=CHECKOUT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as first:
        wait_for_step(tmp_path / "run", 3)
        second = launch(argv, 2)
        assert second.returncode == 2
        assert "another run is writing to" in second.stderr + second.stdout
        assert not (tmp_path / "run" / "end.json").exists()
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    assert first.returncode == 75
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 1 + end(tmp_path / "run")["step"]))


def test_two_runs_do_not_share_a_folder_of_steps(tmp_path: Path) -> None:
    def owned(run: str, *overrides: str) -> AbstractContextManager[None]:
        words = ["--checkpoint.enable", f"--checkpoint.folder={tmp_path / 'steps'}", *overrides]
        return own_folders(load_config([f"--job.dump_folder={tmp_path / run}", *words]))

    refused = pytest.raises(ConfigError, match=r"^checkpoint.folder: another run")
    with owned("a"), owned("b", "--checkpoint.load_only"), refused, owned("c"):
        pass
    with owned("c"), owned("d", "--checkpoint.folder=."):
        pass


def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow_parts.py").write_text(
        "import time\nfrom torchtitan.loss.losses import LOSSES\n"
        "@LOSSES.register('slow')\ndef slow():\n    open('started', 'w').close()\n    time.sleep(100)\n"
    )
    argv = tiny_argv(tmp_path, "--job.imports=slow_parts", "--loss.name=slow")
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{tmp_path}"}
    with started([*TRAIN, *argv], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    assert not (tmp_path / "run").exists()


def test_workers_of_a_killed_launcher_save_and_end(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, "--training.steps=100000", "--checkpoint.enable")
    environment = {**os.environ, **_on_path({"NGPU": "2"})}
    with started(
        ["./run_train.sh", *argv], cwd=CHECKOUT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for_step(tmp_path / "run", 3)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (tmp_path / "run" / "end.json").exists():
        time.sleep(0.1)
    left = end(tmp_path / "run")
    assert left["exit_code"] == 75
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == [f"step-{left['step']}"]
