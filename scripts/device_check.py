"""Whether this machine's device computes what it should, and what a save costs it: python scripts/device_check.py

Trains a small model on the device, and again with each setting that may change how it computes, but not what; and a
larger one that saves in each mode. Prints tables, saves them as device_check.md and device_check.json, and ends with 1
if anything is wrong. A setting that this version refuses is named with the reason.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.config import ConfigError, load_config
from torchtitan.distributed.world import World, init_world, set_determinism
from torchtitan.log import logger
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

AC = "--activation_checkpoint"
SMALL = "--model.args={dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2}"
LARGE = "--model.args={dim = 1024, n_layers = 16, n_heads = 16, vocab_size = 32000}"


@dataclass(frozen=True)
class Twin:
    """A setting that computes the same as ``than``, to a relative difference of ``within``; ``on`` another device."""

    name: str
    argv: tuple[str, ...]
    within: float
    than: tuple[str, ...] = ()
    on: str | None = None
    short: bool = False
    """Whether a short check has it too."""


DOCUMENTS = ("--data.packing=documents",)
TWINS = (
    Twin("on the CPU", (), 1e-4, on="cpu"),
    Twin("documents apart, on the CPU", DOCUMENTS, 1e-4, than=DOCUMENTS, on="cpu"),
    Twin("two batches of a row for one of two", ("--training.local_batch_size=1",), 1e-5, short=True),
    Twin("compiled", ("--compile.enable",), 1e-4),
    Twin("checkpointing full", (f"{AC}.mode=full",), 1e-6, short=True),
    Twin("checkpointing per op", (f"{AC}.mode=selective", f"{AC}.selective_ac_option=op"), 1e-6),
    Twin("loss in 4 pieces", ("--loss.chunks=4",), 1e-5, short=True),
    Twin("compiled, full, loss in 4", ("--compile.enable", f"{AC}.mode=full", "--loss.chunks=4"), 1e-4),
)


def losses_and_norms(world: World, argv: list[str], folder: Path) -> list[float]:
    """Of a short run in float32."""
    common = [
        SMALL,
        "--training.mixed_precision_param=float32",
        "--training.seq_len=64",
        "--training.local_batch_size=2",
        "--training.global_batch_size=2",
        "--training.steps=6",
        "--optimizer.lr=1e-3",
        "--lr_scheduler.warmup_steps=2",
        "--checkpoint.enable=false",
    ]
    lines = trained(world, [*common, *argv], folder)[0]
    return [line[name] for line in lines for name in ("loss", "grad_norm")]


def trained(world: World, argv: list[str], folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """The logged steps of a run, all of them, and the seconds of each."""
    config = load_config([*argv, f"--job.dump_folder={folder}", "--metrics.log_freq=1", "--metrics.peak_tflops=1"])
    job = resolve_job(config, 1)
    folder.mkdir()
    set_determinism(0, deterministic=False, warn_only=False)
    trainer = Trainer(job, world)
    trainer.run(StopRequest())
    trainer.close()
    del trainer
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [line["wall_time"] for line in lines]
    return lines, [after - before for before, after in itertools.pairwise(times)]


def numbers(world: World, folder: Path, twins: tuple[Twin, ...]) -> tuple[list[str], list[dict[str, Any]], int]:
    """Each twin beside what it is a twin of."""
    lines = ["| same numbers | largest relative difference | may be |", "| --- | ---: | ---: |"]
    found: list[dict[str, Any]] = []
    known: dict[tuple[str, ...], list[float]] = {}
    wrong = 0
    for number, twin in enumerate(twins):
        device = world.device if twin.on is None else torch.device(twin.on)
        try:
            if twin.than not in known:
                known[twin.than] = losses_and_norms(world, list(twin.than), folder / f"than-{number}")
            here = dataclasses.replace(world, device=device)
            pairs = list(
                zip(losses_and_norms(here, list(twin.argv), folder / str(number)), known[twin.than], strict=True)
            )
        except ConfigError as error:
            lines.append(f"| {twin.name} | refused: {error} | |")
            found.append({"name": twin.name, "refused": str(error)})
            continue
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        bad = not difference <= twin.within
        wrong += bad
        lines.append(f"| {twin.name} | {difference:.1e}{' WRONG' if bad else ''} | {twin.within:.0e} |")
        found.append({"name": twin.name, "difference": difference, "within": twin.within})
    return lines, found, wrong


def saves(
    world: World, folder: Path, modes: Sequence[str], *, model: str, seq_len: int, interval: int
) -> tuple[list[str], list[Any]]:
    """What two saves of a run cost its steps, in each mode."""
    lines = ["| saves | step s | longest step in which one began | median step after it |"]
    lines.append("| --- | ---: | ---: | ---: |")
    found = []
    for mode in modes:
        argv = [
            model,
            f"--training.seq_len={seq_len}",
            "--training.local_batch_size=2",
            "--training.global_batch_size=2",
            "--training.mixed_precision_param=" + ("float32" if world.device.type == "cpu" else "bfloat16"),
            f"--training.steps={3 * interval - 1}",
            "--checkpoint.enable",
            f"--checkpoint.interval={interval}",
            "--checkpoint.keep_latest_k=2",
            f"--checkpoint.async_mode={mode}",
        ]
        _, steps = trained(world, argv, folder / mode)
        # A save comes after the step's line, so that its pause is told by the next. steps[0] is the second.
        began = [steps[step - 1] for step in (interval, 2 * interval)]
        after = [s for step in (interval, 2 * interval) for s in steps[step : step + interval - 2]]
        plain = statistics.median(steps[1 : interval - 1])
        figures = {"step_seconds": plain, "began_seconds": max(began), "after_seconds": statistics.median(after)}
        lines.append(f"| {mode} | {plain:.4g} | {max(began):.4g} | {figures['after_seconds']:.4g} |")
        found.append({"mode": mode, **figures})
    return lines, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few of the settings, and a model of nothing that saves")
    parser.add_argument("--save", type=Path, default=Path("runs/device_check"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    logger.setLevel("ERROR")
    options.save.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as work, init_world(init_timeout_seconds=300) as world:
        (folder := Path(work, "numbers")).mkdir()
        twins = tuple(twin for twin in TWINS if twin.short or not options.small)
        lines, same, wrong = numbers(world, folder, twins)
        (folder := Path(work, "saves")).mkdir()
        sizes = {"model": SMALL, "seq_len": 64, "interval": 4} if options.small else {}
        modes = ("async",) if options.small else ("disabled", "async", "async_with_pinned_mem")
        more, saved = saves(world, folder, modes, **({"model": LARGE, "seq_len": 2048, "interval": 15} | sizes))
        lines += ["", *more]
    print("\n".join(lines))
    (options.save / "device_check.md").write_text("\n".join(lines) + "\n")
    everything = {"same": same, "saves": saved, "wrong": wrong, "seconds": time.perf_counter() - started}
    (options.save / "device_check.json").write_text(json.dumps(everything, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
