"""The grids of benchmark.py, and how one of their rows is run and timed. Torch is not imported here.

Not a command.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.allocator import KEEPING, settings, usual_places
from torchtitan.platforms import cores
from torchtitan.resilience.end import BAD_CONFIG

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3  # steps that do not count: what is compiled, is compiled in them


@dataclass(frozen=True)
class Shape:
    """A model, and what it is fed: ``argv`` are overrides."""

    argv: tuple[str, ...]
    seq_len: int
    batch: int
    peer: tuple[str, Mapping[str, Any]] | None = None
    """The same model in TorchTitan: its flavor, and its arguments where it has no such flavor."""

    def overrides(self) -> list[str]:
        return [*self.argv, f"--training.seq_len={self.seq_len}", f"--training.local_batch_size={self.batch}"]


def _llama(flavor: str, seq_len: int, batch: int) -> Shape:
    return Shape((f"--model.flavor={flavor}",), seq_len, batch)


_768 = {"dim": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 32000}
SHAPES = {
    "tiny": Shape(("--model.args={dim = 32, n_layers = 2, n_heads = 2}",), 64, 2),
    "debug": Shape(("--model.flavor=debugmodel",), 1024, 2, peer=("debugmodel", {})),
    "dim768": Shape(
        ("--model.args={" + ", ".join(f"{k} = {v}" for k, v in _768.items()) + "}",), 1024, 2, peer=("dim768", _768)
    ),
    "1B-4096": _llama("1B", 4096, 4),
    "1B-8192": _llama("1B", 8192, 2),
    "3B-4096": _llama("3B", 4096, 2),
    "3B-8192": _llama("3B", 8192, 1),
}
PRECISIONS = {
    "float32": ("--training.mixed_precision_param=float32",),
    "bfloat16": ("--training.mixed_precision_param=bfloat16",),
    **{
        f"float8 {recipe}": (
            "--training.mixed_precision_param=bfloat16",
            "--model.converters=quantize.linear.float8",
            f"--quantize.linear.float8.recipe_name={recipe}",
        )
        for recipe in ("tensorwise", "rowwise")
    },
}
_AC = "--activation_checkpoint"
CHECKPOINTING = {
    "none": (),
    "full": (f"{_AC}.mode=full",),
    "every 2nd": (f"{_AC}.mode=selective", f"{_AC}.selective_ac_option=2"),
    "per op": (f"{_AC}.mode=selective", f"{_AC}.selective_ac_option=op"),
}


@dataclass(frozen=True)
class Row:
    """One setting. ``allocator`` is that of host memory: what the launcher picks ("launcher"), or one by name."""

    shape: str
    precision: str = "float32"
    compiled: bool = False
    checkpointing: str = "none"
    chunks: int = 1
    allocator: str = "launcher"
    peer: bool = False

    def __str__(self) -> str:
        parts = [self.shape, self.precision, "compiled" if self.compiled else "eager"]
        parts += [] if self.checkpointing == "none" else [f"checkpointing {self.checkpointing}"]
        parts += [] if self.chunks == 1 else [f"loss in {self.chunks}"]
        parts += [] if self.allocator == "launcher" else [self.allocator]
        return ", ".join((["TorchTitan"] if self.peer else []) + parts)

    def overrides(self) -> list[str]:
        argv = [*SHAPES[self.shape].overrides(), *PRECISIONS[self.precision], *CHECKPOINTING[self.checkpointing]]
        argv += ["--compile.enable"] if self.compiled else []
        return argv + ([] if self.chunks == 1 else [f"--loss.chunks={self.chunks}"])

    def floor(self) -> Row:
        """The row with the same bare kernels: neither recomputing nor compiling changes what is needed."""
        return Row(self.shape, self.precision, allocator=self.allocator)


def product(
    shapes: Iterable[str],
    precisions: Iterable[str] = ("float32",),
    compiled: Iterable[bool] = (False, True),
    checkpointing: Iterable[str] = ("none",),
    chunks: Iterable[int] = (1,),
    allocators: Iterable[str] = ("launcher",),
) -> list[Row]:
    """Every combination."""
    return [Row(*each) for each in itertools.product(shapes, precisions, compiled, checkpointing, chunks, allocators)]


def _both(shape: str) -> list[Row]:
    return [
        *product([shape], checkpointing=["none", "per op", "full"]),
        *product([shape], chunks=[8]),
        *product([shape], precisions=["bfloat16"]),
    ]


GRIDS = {
    "debug": _both("debug"),
    "dim768": _both("dim768"),
    "plain": product(["debug", "dim768"]),
    "allocators": product(["dim768"], allocators=["system", "keeping", "tcmalloc"]),
    # In the order in which they are missed least if time runs out.
    "gpu": [
        Row("1B-4096", "bfloat16", True),
        Row("1B-4096", "bfloat16"),
        Row("1B-4096", "float8 tensorwise", True),
        Row("1B-4096", "float8 rowwise", True),
        Row("3B-4096", "bfloat16", True),
        Row("3B-8192", "bfloat16", True, "full"),
        Row("1B-4096", "bfloat16", True, "full"),
        Row("1B-4096", "bfloat16", True, "per op"),
        Row("1B-4096", "bfloat16", True, chunks=8),
        Row("1B-8192", "bfloat16", True),
        Row("3B-4096", "float8 tensorwise", True),
        Row("3B-8192", "bfloat16", False, "full"),
        Row("1B-8192", "float8 rowwise", True),
    ],
    "gpu-small": [Row("tiny")],
}


class NotRun(Exception):
    """A row that cannot be run here, and why, in a line."""


@dataclass
class Measured:
    """What the rounds of a row gave: a list of a number a step, or one a round."""

    step_seconds: list[list[float]] = field(default_factory=list)
    startup_seconds: list[float] = field(default_factory=list)
    peak_gib: list[float] = field(default_factory=list)
    data_percent: list[float] = field(default_factory=list)


def environment(allocator: str) -> dict[str, str]:
    """That of a run with the allocator, and with as many threads as there are cores. NotRun where it is missing."""
    bare = {k: v for k, v in os.environ.items() if k not in {"LD_PRELOAD", *KEEPING}}
    bare = {"OMP_NUM_THREADS": str(cores()), **bare, "NGPU": "1", "HF_HUB_OFFLINE": "1"}
    if allocator == "launcher":  # which chooses; asked here so that the bare kernels get the same
        chosen = {k: os.environ[k] for k in ("LD_PRELOAD", *KEEPING) if k in os.environ}
        return bare | (chosen or settings(bare, usual_places()))
    if allocator == "system":
        return bare | {"LD_PRELOAD": ""}
    if allocator == "keeping":
        return bare | KEEPING
    found = settings(bare, usual_places())
    if "LD_PRELOAD" in os.environ and allocator in os.environ["LD_PRELOAD"]:
        found = {"LD_PRELOAD": os.environ["LD_PRELOAD"]}
    if allocator not in found.get("LD_PRELOAD", ""):
        raise NotRun(f"{allocator} is not installed (apt-get install libtcmalloc-minimal4)")
    return bare | found


def run(row: Row, folder: Path, into: Measured, *, steps: int, log_freq: int) -> None:
    """Train ``steps`` steps of ``row`` in ``folder``, and add what it gave. NotRun if it cannot be trained."""
    argv = [
        *row.overrides(),
        "--training.global_batch_size=-1",
        f"--training.steps={steps}",
        f"--metrics.log_freq={log_freq}",
        "--metrics.enable_tensorboard=false",
        "--metrics.peak_tflops=1",
        "--checkpoint.enable=false",
        f"--job.dump_folder={folder}",
    ]
    command = [sys.executable, "-m", "torchtitan.launch", *argv]
    started = time.time()
    _child(command, environment(row.allocator), ROOT)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > WARM_UP + log_freq - 1] or lines[-1:]
    into.step_seconds.append([line["step_seconds"] for line in counted])
    into.startup_seconds.append(lines[0]["wall_time"] - started)
    shares = [100 * line["data_loading_seconds"] / line["step_seconds"] for line in counted]
    into.data_percent.append(sum(shares) / len(shares))
    into.peak_gib.append(max(line["memory_gib"] for line in lines))


def run_peer(row: Row, folder: Path, into: Measured, *, steps: int, program: Sequence[str]) -> None:
    """The same for TorchTitan, started by the interpreter and the script in ``program``."""
    python, script = program
    shape = SHAPES[row.shape]
    if shape.peer is None:
        raise NotRun("TorchTitan is given this model by nobody")
    flavor, arguments = shape.peer
    folder.mkdir()
    _peer_data(folder)
    argv = [
        "--model.name=llama3",
        f"--model.flavor={flavor}",
        f"--model.hf_assets_path={ROOT / 'torchtitan/assets/debug_tokenizer'}",
        "--training.dataset=c4_test",
        f"--training.seq_len={shape.seq_len}",
        f"--training.local_batch_size={shape.batch}",
        f"--training.steps={steps}",
        *PRECISIONS[row.precision],
        "--metrics.log_freq=1",
        "--activation_checkpoint.mode=none",
        *(["--compile.enable"] if row.compiled else []),
    ]
    torchrun = [
        str(Path(python).parent / "torchrun"),
        "--nproc_per_node=1",
        "--standalone",
        str(Path(script).resolve()),
        *argv,
    ]
    given = environment(row.allocator)
    given.pop("PYTHONPATH", None)
    if arguments:
        given["PEER_FLAVORS"] = json.dumps({flavor: arguments})
    started = time.time()
    shown, peak_gib = _child(torchrun, given, folder)
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    found = re.findall(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})[^\n]*?\bstep: *(\d+)[^\n]*?\btps: *([\d,]+)", shown)
    if len(found) < steps:
        raise NotRun(f"TorchTitan told of {len(found)} steps of {steps}")
    ends = [datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp() for when, _, _ in found]
    # Between the ends of steps: its tps are whole numbers, of which a slow step's has few digits.
    into.step_seconds.append([after - before for before, after in itertools.pairwise(ends[WARM_UP - 1 :])])
    into.startup_seconds.append(ends[0] - started)
    into.peak_gib.append(peak_gib)


def _peer_data(folder: Path) -> None:
    """Text where TorchTitan looks for its small data set."""
    place = folder / "tests/assets/c4_test"
    place.mkdir(parents=True)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    lines = (json.dumps({"text": source.read_text(errors="replace")}) for source in sources)
    (place / "data.json").write_text("\n".join(lines))


def bare_kernels(row: Row, folder: Path) -> dict[str, Any]:
    """What bare_kernels.py says of ``row``. NotRun if it cannot."""
    command = [sys.executable, str(ROOT / "scripts/bare_kernels.py"), *row.overrides()]
    command += ["--training.global_batch_size=-1", f"--job.dump_folder={folder}"]
    shown, _ = _child(command, environment(row.allocator), ROOT)
    found: dict[str, Any] = json.loads(shown.strip().splitlines()[-1])
    return found


def _child(command: Sequence[str], given: Mapping[str, str], folder: Path) -> tuple[str, float]:
    """What a process printed, and the peak of its memory and its children's in GiB. NotRun if it failed."""
    process = subprocess.Popen(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        shown = process.stdout.read()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code:
        said = [line.strip() for line in shown.splitlines() if line.strip()] or ["nothing was said"]
        memory = next((line for line in said if "out of memory" in line.lower()), None)
        raise NotRun(said[-1] if code == BAD_CONFIG else f"failed with {code}: {memory or said[-1]}")
    return shown, usage.ru_maxrss / 2**20
