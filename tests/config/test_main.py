"""``python -m torchtitan.config``: what is printed where, and the exit code."""

from collections.abc import Callable

import pytest

from torchtitan.config.__main__ import main
from torchtitan.config.toml import parse

Write = Callable[..., list[str]]


def test_print(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print", *write("[training]\nsteps = 5\n"), "--training.seq_len", "64"]) == 0
    out, err = capsys.readouterr()
    assert "steps = 5  # job.toml" in out and "seq_len = 64  # command line" in out
    assert parse(out)["training"]["steps"] == 5
    assert err == ""


@pytest.mark.parametrize("command", [["print"], ["check"], ["explain", "training.steps"]])
def test_a_bad_configuration(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--training.step", "5", "--training.batch_size", "4"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "training.step (command line): unknown key; did you mean training.steps?\n")


def test_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["check", "--training.steps", "5"]) == 0
    assert capsys.readouterr().out == "OK: llama3 debugmodel, 5 steps on 1 rank, tokenizer of the debug model\n"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["check", "--training.steps", "5"]) == 0
    assert capsys.readouterr().out == "OK: llama3 debugmodel, 5 steps on 4 ranks, tokenizer of the debug model\n"


def test_check_finds_what_the_schema_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["check", "--parallelism.data_parallel_shard_degree", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("parallelism.data_parallel_shard_degree=2 (command line): ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("size", ["0", "-1", "two", ""])
def test_check_wants_a_world(size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(["check"]) == 2
    assert capsys.readouterr().err == f"WORLD_SIZE={size} in the environment is no number of ranks\n"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "training.steps", "--training.steps", "5"]) == 0
    assert "now:       5 (command line)" in capsys.readouterr().out
    assert main(["explain", "training.step"]) == 2
    assert capsys.readouterr().err == "training.step: unknown key; did you mean training.steps?\n"
    assert main(["explain", "--training.steps", "5"]) == 2
    assert capsys.readouterr().err.startswith("explain what?")


def test_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    assert "| `training.steps` | `int >= 1` | `10000` | optimizer steps |\n" in capsys.readouterr().out
    assert main(["reference", "--training.steps", "5"]) == 2


@pytest.mark.parametrize("arguments", [[], ["convert"]])
def test_other_commands_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "print|check|explain|reference" in capsys.readouterr().err


def test_check_finds_a_sequence_longer_than_the_model_has_positions_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["check", "--model.name", "gpt2", "--training.seq_len", "2048"]) == 0
    capsys.readouterr()
    assert main(["check", "--model.name", "gpt2", "--training.seq_len", "2049"]) == 2
    assert capsys.readouterr().err == (
        "training.seq_len=2049 (command line): the model has positions for 2048 tokens; lower it, or raise "
        "model.args.max_seq_len\n"
    )
