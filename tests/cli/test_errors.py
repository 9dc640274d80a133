"""How errors of a run are told at its end."""

import json
from pathlib import Path

import pytest

from tests.runs import tiny_argv
from torchtitan.config import load_config
from torchtitan.errors import LostProcessError
from torchtitan.train import fail


def failed_with(error: BaseException, folder: Path) -> str:
    assert fail(error, load_config(tiny_argv(folder, "--comm.train_timeout_seconds=8")), 3) == 1
    told: str = json.loads((folder / "run" / "end.json").read_text())["error"]
    return told


def test_who_waited_in_vain_says_so_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    error = RuntimeError("Failed to run stage backward: ['Tensor(torch.Size([1, 24, 32]))']")
    error.__cause__ = RuntimeError("Timed out waiting 8000ms for send operation to complete")
    told = failed_with(error, tmp_path)
    last = told.strip().splitlines()[-1]
    assert last.startswith("another rank did not answer within comm.train_timeout_seconds=8 ")
    assert last in capsys.readouterr().err


def test_a_process_that_was_lost_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert failed_with(LostProcessError("a worker was killed"), tmp_path) == "a worker was killed"


@pytest.mark.parametrize("error", [RuntimeError("boom"), TimeoutError("the bucket timed out")])
def test_any_other_error_is_its_own_last_line(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "run").mkdir()
    assert failed_with(error, tmp_path).strip().splitlines()[-1] == f"{type(error).__name__}: {error}"
