"""What an optimizer keeps and how it trains: the debug model on the real text that comes with the package."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.runs import metrics
from torchtitan.config import load_config
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.world import World
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

LAST = 20
"""Steps at the end whose mean loss is compared."""


@dataclass
class Cost:
    """Bytes of state for each parameter, mean loss of the last steps, and seconds of the processor that an update
    takes, the median of all but the first three."""

    bytes: float
    loss: float
    seconds: float


def cost(world: World, folder: Path, words: Sequence[str], steps: int) -> Cost:
    """Of a run of ``steps`` of 512 tokens, in float32."""
    argv = [
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--training.seq_len=256",
        "--training.local_batch_size=2",
        "--training.mixed_precision_param=float32",
        "--lr_scheduler.warmup_steps=20",
        "--metrics.log_freq=1",
        "--metrics.peak_tflops=1",
        *words,
    ]
    folder.mkdir(parents=True)
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    seconds: list[float] = []
    step = trainer.optimizer.step

    def timed() -> None:
        before = time.process_time()
        step()
        seconds.append(time.process_time() - before)

    trainer.optimizer.step = timed  # type: ignore[method-assign, assignment]
    trainer.run(StopRequest(None))
    trainer.close()
    states = [local_part(value) for state in trainer.optimizer.state.values() for value in state.values()]
    numbers = sum(parameter.numel() for parameter in trainer.parameters)
    losses = [line["loss"] for line in metrics(folder)][-LAST:]
    return Cost(
        sum(s.nbytes for s in states) / numbers, sum(losses) / len(losses), sorted(seconds[3:])[len(seconds) // 2]
    )
