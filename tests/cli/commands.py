"""The commands as users start them, and how far a run has come."""

import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.conftest import CHECKOUT
from tests.launch import run_command, started
from tests.runs import metrics

TRAIN = [sys.executable, "-m", "torchtitan.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "torchtitan.train"]


def run(command: list[str], *, timeout: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(command, timeout=timeout, cwd=CHECKOUT, env={**os.environ, **environment})


def launch(argv: list[str], ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["./run_train.sh", *argv], NGPU=str(ranks), **on_path(environment))


def launched(
    argv: list[str], ranks: int, *, output: int = subprocess.PIPE
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A run while it goes on; what it says goes to ``output``."""
    environment = {**os.environ, **on_path({"NGPU": str(ranks)})}
    return started(["./run_train.sh", *argv], cwd=CHECKOUT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def on_path(environment: dict[str, str]) -> dict[str, str]:
    """run_train.sh calls plain `python`, which must be the one that runs the tests."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}


def end(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "end.json").read_text())


def wait_for_step(folder: Path, step: int, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in {seconds} s")
