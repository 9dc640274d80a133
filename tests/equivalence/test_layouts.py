"""Every layout of data parallelism against one process: weights, loss, norm, and each parameter's gradient.

Weights are wide (attention far from uniform), clipping is off, labels are missing in uneven numbers.
"""

import dataclasses
import json
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from torchtitan.config import load_config
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.world import World
from torchtitan.models.init import Normal, draw
from torchtitan.resolve import resolve_job
from torchtitan.trainer import Trainer

STEPS = 10
TOLERANCE = 1e-5

# Global batch 6: four ranks hold two rows each, two of them padding. Micro-batches of one or two rows.
BASE = [
    "--training.dataset=jsonl",
    "--training.seq_len=48",
    "--training.global_batch_size=6",
    f"--training.steps={STEPS}",
    "--training.max_norm=0",
    "--training.mixed_precision_param=float32",
    "--optimizer.lr=1e-3",
    # Adam's update of a gradient near zero is its sign: a larger eps keeps rounding from being turned into steps.
    "--optimizer.eps=1e-4",
    "--lr_scheduler.warmup_steps=2",
    "--tokenizer.name=bytes",
    "--data.bos_id=256",
    "--data.eos_id=257",
    "--model.args={dim=32, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=301, multiple_of=16}",
    "--metrics.peak_tflops=1",
]

# name → ranks, overrides
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank, accumulating": (1, ["--training.local_batch_size=1"]),
    "one rank, tied": (1, ["--training.local_batch_size=6", "--model.args.tie_word_embeddings=true"]),
    "one rank, offloaded": (1, ["--training.local_batch_size=6", "--training.enable_cpu_offload"]),
    "shard 2": (2, ["--training.local_batch_size=3"]),
    "replicate 2": (2, ["--parallelism.data_parallel_replicate_degree=2"]),
    "shard 2, accumulating": (2, ["--training.local_batch_size=2"]),
    "shard 4": (4, []),
    "shard 4, tied": (4, ["--model.args.tie_word_embeddings=true"]),
    "shard 4, always reshard": (4, ["--parallelism.fsdp_reshard_after_forward=always"]),
    "shard 4, never reshard": (4, ["--parallelism.fsdp_reshard_after_forward=never"]),
    "replicate 4": (4, ["--parallelism.data_parallel_replicate_degree=4"]),
    "replicate 2 × shard 2": (4, ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=1"]),
}


@dataclasses.dataclass
class Record:
    initial: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]


def mask(batch: Batch) -> Batch:
    """Ignore labels by what a row holds, so that rows differ in how many count and some have none."""
    labels = batch.labels.clone()
    labels[(batch.tokens * 7 + batch.positions) % 6 == 0] = IGNORE_INDEX
    labels[batch.tokens[:, 0] % 4 == 1] = IGNORE_INDEX
    return dataclasses.replace(batch, labels=labels)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


@torch.no_grad()
def widen(trainer: Trainer) -> None:
    """Wide weights, drawn by name: with fresh ones a wrong position changes the logits by 1e-5 only."""
    for name, parameter in trainer.named_parameters:
        spread = 0.3 if "norm" in name else 2.0 / parameter.shape[-1] ** 0.5
        offset = 1.0 if "norm" in name else 0.0
        for chunk in parameter.__create_chunk_list__():
            wide = draw(name, parameter.shape, Normal(spread), 1, chunk.offsets, chunk.sizes)
            parameter.to_local().copy_(wide + offset)


def record(world: World, argv: list[str], sabotage: str | None = None) -> Record:
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    initial = {name: full(p) for name, p in trainer.named_parameters}
    widen(trainer)
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            gradients.update({name: full(p.grad) for name, p in trainer.named_parameters})

    trainer.optimizer.register_step_pre_hook(keep)
    if sabotage == "local normaliser":
        trainer.runner.forward_backward = _divided_locally(trainer.runner.forward_backward)
    losses, norms = [], []
    batches = iter(trainer.loader)
    for _ in range(STEPS):
        rows = [mask(batch) for batch in next(batches)]
        (num_valid,) = world.sum([sum(b.num_valid() for b in rows)])
        loss, norm = trainer.train_step(rows, num_valid)
        losses.append(world.sum([float(loss)])[0])
        norms.append(float(norm))
    trainer.close()
    return Record(initial, gradients, losses, norms)


def _divided_locally(forward_backward: Any) -> Any:
    return lambda batch, num_valid: forward_backward(batch, max(batch.num_valid(), 1) * num_valid / 250)


def record_all(world: World, argvs: dict[str, list[str]], sabotage: str | None = None) -> dict[str, Record] | None:
    records = {name: record(world, argv, sabotage) for name, argv in argvs.items()}
    return records if world.rank == 0 else None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("equivalence")
    lines = (json.dumps({"text": f"{n} times {n} is {n * n}; and " * (1 + n % 5)}) for n in range(200))
    (folder / "text.jsonl").write_text("\n".join(lines))
    return [*BASE, f"--training.dataset_path={folder / 'text.jsonl'}", f"--job.dump_folder={folder / 'run'}"]


@pytest.fixture(scope="module")
def reference(base: list[str]) -> dict[bool, Record]:
    """One process, whole batch at once; untied and tied."""
    argvs = {
        "untied": [*base, "--training.local_batch_size=6"],
        "tied": [*base, "--training.local_batch_size=6", "--model.args.tie_word_embeddings=true"],
    }
    (records,) = run_ranks(record_all, 1, argvs)
    return {False: records["untied"], True: records["tied"]}


def largest_difference(got: Record, expected: Record) -> dict[str, float]:
    def relative(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    assert set(got.gradients) == set(expected.gradients)
    return {
        "loss": max(abs(a - b) for a, b in zip(got.losses, expected.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(got.norms, expected.norms, strict=True)),
        "gradient": max(relative(got.gradients[name], expected.gradients[name]) for name in expected.gradients),
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layouts_give_the_numbers_of_one_process(base: list[str], reference: dict[bool, Record], ranks: int) -> None:
    argvs = {name: [*base, *overrides] for name, (n, overrides) in LAYOUTS.items() if n == ranks}
    records = run_ranks(record_all, ranks, argvs)[0]
    for name, got in records.items():
        expected = reference["tied" in name]
        for parameter, value in expected.initial.items():
            assert torch.equal(got.initial[parameter], value), f"{name}: {parameter} starts from other weights"
        difference = largest_difference(got, expected)
        print(f"{name:28s} " + "  ".join(f"{key} {value:.1e}" for key, value in difference.items()))
        assert max(difference.values()) <= TOLERANCE, f"{name}: {difference}"


def test_the_comparison_sees_a_mean_of_means(base: list[str], reference: dict[bool, Record]) -> None:
    """Dividing by a rank's own number of labels is the classic fault; the tolerance must not hide it."""
    argvs = {"shard 2": [*base, "--training.local_batch_size=3"]}
    records = run_ranks(record_all, 2, argvs, "local normaliser")[0]
    assert largest_difference(records["shard 2"], reference[False])["gradient"] > 100 * TOLERANCE
