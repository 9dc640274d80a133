"""Small runs of the real trainer inside a test's ranks, and what a test wants to know of them."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from torchtitan.config import load_config
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.world import World
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

TINY = "{dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=301, multiple_of=16}"


def tiny_text(folder: Path) -> Path:
    """The text of tiny runs, below ``folder``. Stored checkpoints stand at rows of it, so it stays as it is."""
    text = folder / "text.jsonl"
    if not text.exists():
        lines = (json.dumps({"text": f"{n} times {n} is {n * n}; and " * (1 + n % 5)}) for n in range(100))
        text.write_text("\n".join(lines))
    return text


def tiny_argv(folder: Path, *overrides: str, run: str = "run") -> list[str]:
    """Overrides of a run of seconds: a tiny model on text of its own, bytes as tokens, float32, every step logged."""
    text = tiny_text(folder)
    return [
        "--training.dataset=jsonl",
        f"--training.dataset_path={text}",
        f"--job.dump_folder={folder / run}",
        "--training.seq_len=48",
        "--training.global_batch_size=6",
        "--training.steps=20",
        "--training.mixed_precision_param=float32",
        "--optimizer.lr=1e-3",
        "--lr_scheduler.warmup_steps=2",
        "--tokenizer.name=bytes",
        "--data.bos_id=256",
        "--data.eos_id=257",
        f"--model.args={TINY}",
        "--metrics.peak_tflops=1",
        "--metrics.log_freq=1",
        *overrides,
    ]


@dataclass
class Outcome:
    """What one run did: per step its loss, norm and the hashes of its rows in global order; the weights at the end."""

    finished: bool
    steps: list[int]
    losses: list[float]
    norms: list[float]
    rates: list[float]
    tokens_seen: list[int]
    rows: list[list[str]]
    weights: dict[str, torch.Tensor]


def run_job(world: World, argv: Sequence[str]) -> Outcome:
    """Run the trainer to its end on the ranks of ``world``."""
    config = load_config(argv)
    Path(config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    trainer = Trainer(resolve_job(config, world.size), world)
    own_rows: list[list[str]] = []
    step = trainer.train_step

    def spy(batches: Sequence[Batch], num_valid: float) -> tuple[torch.Tensor, torch.Tensor]:
        own_rows.append([row for batch in batches for row in row_hashes(batch)])
        return step(batches, num_valid)

    trainer.train_step = spy  # type: ignore[method-assign]
    finished = trainer.run(StopRequest(config.job.max_duration_minutes))
    trainer.close()
    by_reader = dict(world.gather((trainer.topology.reader_rank, own_rows)))
    ordered = [rows for _, rows in sorted(by_reader.items())]
    lines = metrics(Path(config.job.dump_folder)) if world.rank == 0 else []
    return Outcome(
        finished=finished,
        steps=[line["step"] for line in lines],
        losses=[line["loss"] for line in lines],
        norms=[line["grad_norm"] for line in lines],
        rates=[line["lr"] for line in lines],
        tokens_seen=[line["tokens_seen"] for line in lines],
        rows=[[row for rows in readers for row in rows] for readers in zip(*ordered, strict=True)],
        weights=whole_parameters({name: p.detach() for name, p in trainer.runner.named_parameters}, world),
    )


def whole_parameters(tensors: Mapping[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """Tensors of all stages, each put together from its parts, on every rank."""
    # It notes that a tensor split in two directions comes together in two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mine = {name: t.full_tensor().clone() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}
    holder: dict[str, int] = {}
    for rank, names in enumerate(world.gather(list(mine))):
        holder |= {name: rank for name in names if name not in holder}
    stages: dict[str, torch.Tensor] = {}
    for theirs in world.gather({name: t for name, t in mine.items() if holder[name] == world.rank}):
        stages |= theirs
    return stages


def run_jobs(world: World, argvs: Sequence[Sequence[str]]) -> list[Outcome]:
    """Several runs one after the other in the same processes."""
    return [run_job(world, argv) for argv in argvs]


def row_hashes(batch: Batch) -> list[str]:
    """A hash of each row that counts; padding has none."""
    rows = zip(batch.tokens, batch.labels, batch.positions, strict=True)
    return [
        hashlib.sha256(b"".join(part.numpy().tobytes() for part in row)).hexdigest()[:16]
        for row in rows
        if (row[1] != IGNORE_INDEX).any()
    ]


def metrics(folder: Path) -> list[dict[str, float]]:
    """The logged steps of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
