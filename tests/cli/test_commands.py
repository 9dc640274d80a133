"""The commands as users type them: what they print, how fast, and what a run leaves."""

import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import TRAIN, end, launch, run
from tests.launch import run_main
from tests.runs import metrics, tiny_argv
from torchtitan.train import main as train_main


@pytest.fixture
def _signals_as_they_were() -> Iterator[None]:
    """The command run inside the tests' own process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def takes_less_than(seconds: float, command: list[str]) -> bool:
    """Of a processor, in the best of three tries: on a machine with nothing else to do, that is how long it takes."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    for _ in range(3):
        start = spent()
        run(command)
        if spent() - start < seconds:
            return True
    return False


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
    assert takes_less_than(1.0, [*TRAIN, "--help"])
    command = " ".join([*TRAIN, "--help"])
    begun = subprocess.run(["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"], capture_output=True, text=True)
    assert (begun.returncode, begun.stderr) == (0, "") and begun.stdout.count("\n") == 1

    typo = run([*TRAIN, "--training.step", "5"])
    assert typo.returncode == 2
    assert typo.stderr.strip().splitlines() == [typo.stderr.strip()]
    assert "training.step" in typo.stderr and "did you mean training.steps" in typo.stderr
    assert "command line" in typo.stderr
    assert takes_less_than(1.0, [*TRAIN, "--training.step", "5"])


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
@pytest.mark.usefixtures("_signals_as_they_were")
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
    assert takes_less_than(6.0, command)


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
    code, printed = run_main(train_main, argv, folder=tmp_path)
    assert code == 0
    assert "nothing left to do" in printed
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before

    # The configuration it left is the run's: more steps go on from there.
    more = [f"--job.config_file={folder / 'config.toml'}", "--training.steps=6"]
    code, printed = run_main(train_main, more, folder=tmp_path)
    assert code == 0, printed
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_wrong_key_stops_the_launcher(tmp_path: Path) -> None:
    ended = launch(tiny_argv(tmp_path, "--training.step=4"), 2)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
