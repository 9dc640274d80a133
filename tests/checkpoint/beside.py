"""What a save costs training: intervals of steps with one and without, alternating, and the memory of many saves.

Figures mean something only where nothing else runs; what is right or wrong about a save is tested elsewhere.
"""

import logging
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.checkpoint.runs import said
from tests.runs import tiny_text
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

_SAVED = re.compile(r"saved step (\d+) in .*\(([0-9.]+) s\)")
MODES = ("disabled", "async", "async_with_pinned_mem")
TARGETS = {"ratio": 1.25, "stall": 0.3, "longest": 2.5}
"""Of a save beside training, at most: (interval with one) / (without), seconds inside save(), longest step / median."""


@dataclass(frozen=True)
class Size:
    """The model, 2 × 256 tokens a step, and how many steps an interval has."""

    dim: int = 512
    layers: int = 8
    vocabulary: int = 24000
    interval: int = 10
    repetitions: int = 3
    threads: int = 2
    seq_len: int = 256

    def argv(self, folder: Path, mode: str) -> list[str]:
        sizes = f"dim={self.dim}, n_layers={self.layers}, n_heads=8, n_kv_heads=8, vocab_size={self.vocabulary}"
        return [
            "--training.dataset=jsonl",
            f"--training.dataset_path={tiny_text(folder)}",
            f"--job.dump_folder={folder / mode}",
            f"--training.seq_len={self.seq_len}",
            "--training.local_batch_size=2",
            "--training.mixed_precision_param=float32",
            "--tokenizer.name=bytes",
            "--data.bos_id=256",
            "--data.eos_id=257",
            f"--model.args={{{sizes}, multiple_of=64}}",
            "--metrics.peak_tflops=1",
            "--metrics.log_freq=1000",
            "--checkpoint.enable",
            "--checkpoint.keep_latest_k=2",
            f"--checkpoint.async_mode={mode}",
        ]


TINY = Size(dim=32, layers=1, vocabulary=301, interval=2, repetitions=2, threads=1, seq_len=32)


@dataclass
class Cost:
    """Of each repetition, in seconds: both intervals, the save() of the one, its longest step, and the writing (fewer,
    where one was still being written when the next was due). Of all: the median step of intervals without a save;
    parameters and bytes."""

    with_save: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    step: float = 0.0
    parameters: int = 0
    bytes: int = 0

    def figures(self) -> dict[str, float]:
        """What the targets are for, as medians over the repetitions."""
        return {
            "ratio": statistics.median(a / b for a, b in zip(self.with_save, self.without, strict=True)),
            "stall": statistics.median(self.stall),
            "longest": statistics.median(self.longest) / self.step,
        }


def cost(world: World, folder: Path, mode: str, size: Size) -> Cost:
    """Train one process through ``size.repetitions`` pairs of intervals, the first of each with a save before it."""
    torch.set_num_threads(size.threads)
    every, times = 2 * size.interval, size.repetitions
    config = load_config(
        [*size.argv(folder, mode), f"--checkpoint.interval={every}", f"--training.steps={every * (times + 1) + 1}"]
    )
    Path(config.job.dump_folder).mkdir()
    trainer = Trainer(resolve_job(config, world.size), world)
    assert trainer.checkpointer is not None
    save, before, inside = trainer.checkpointer.save, {0: time.perf_counter()}, {0: 0.0}

    def timed(step: int, *, last: bool = False) -> None:
        begin = time.perf_counter()
        save(step, last=last)
        if not last:
            before[step], inside[step] = begin, time.perf_counter() - begin

    trainer.checkpointer.save = timed  # type: ignore[method-assign]
    with said(logging.INFO) as lines:
        trainer.run(StopRequest())
    trainer.close()
    result = Cost(parameters=sum(p.numel() for p in trainer.parameters))
    steps = {step: before[step] - before[step - 1] for step in before if step}
    quiet = []
    for n in range(1, times + 1):
        save_at, middle, end = n * every, n * every + size.interval, (n + 1) * every
        result.with_save.append(before[middle] - before[save_at])
        result.without.append(before[end] - before[middle])
        result.stall.append(inside[save_at])
        result.longest.append(max(steps[step] for step in range(save_at + 1, middle + 1)))
        quiet += [steps[step] for step in range(middle + 1, end + 1)]
    result.step = statistics.median(quiet)
    seconds = {
        int(m[1]): float(m[2]) for line in lines if (m := re.match(r"saved step (\d+) in .*\(([0-9.]+) s\)", line))
    }
    result.written = [seconds[n * every] for n in range(1, times + 1) if n * every in seconds]
    newest = Path(config.job.dump_folder) / "checkpoint" / f"step-{every * (times + 1) + 1}"
    result.bytes = sum(f.stat().st_size for f in newest.iterdir())
    return result


def memory(world: World, folder: Path, mode: str, size: Size, saves: int) -> list[int]:
    """Anonymous memory in kB after each of so many saves, a step between two."""
    torch.set_num_threads(size.threads)
    argv = [*size.argv(folder, mode), "--checkpoint.interval=1", f"--training.steps={saves}"]
    config = load_config(argv)
    Path(config.job.dump_folder).mkdir()
    trainer = Trainer(resolve_job(config, world.size), world)
    checkpointer = trainer.checkpointer
    assert checkpointer is not None
    save, after = checkpointer.save, []

    def watched(step: int, *, last: bool = False) -> None:
        save(step, last=last)
        checkpointer.finish()
        if not last:
            status = Path("/proc/self/status").read_text()
            after.append(int(status.partition("RssAnon:")[2].split()[0]))

    checkpointer.save = watched  # type: ignore[method-assign]
    trainer.run(StopRequest())
    trainer.close()
    return after


def growth(after: Sequence[int]) -> float:
    """Of memory from the saves after the first few to the last ones, as a share of it; single readings swing by more
    than that, without any save too."""
    return statistics.median(after[-7:]) / statistics.median(after[3:10]) - 1
