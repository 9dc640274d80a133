"""The layouts that are compared with one process, and what a comparison records of a run.

Weights are wide (attention far from uniform), clipping is off, no degree divides the vocabulary of 101, labels are
missing in uneven numbers, and the first quarter of the rows has none at all.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.runs import whole_parameters
from torchtitan.config import load_config
from torchtitan.config.toml import value_text
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed import tensor
from torchtitan.distributed.context import ContextSplit
from torchtitan.distributed.pipeline import PipelineRunner
from torchtitan.distributed.runner import WholeRunner
from torchtitan.distributed.world import World
from torchtitan.models.init import Normal, draw
from torchtitan.models.spec import MODELS
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

STEPS = 2
TOLERANCE = {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-5}
# Rounding to bf16 in other places: of a loss of about 5, and of each parameter's gradient.
BF16_TOLERANCE = {"loss": 2e-2, "norm": 1e-2, "gradient": 6e-2}

BASE = [
    "--job.imports=tests.equivalence.parts",
    "--tokenizer.name=residues",
    "--training.dataset=jsonl",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--training.max_norm=0",
    "--training.mixed_precision_param=float32",
    "--optimizer.lr=1e-3",
    # Adam's update of a gradient near zero is its sign: a larger eps keeps rounding from being turned into steps.
    "--optimizer.eps=1e-4",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.peak_tflops=1",
]

# What of it the family has.
SIZES = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 101,
    "ffn_dim": 48,
    "max_seq_len": 33,
    "tie_word_embeddings": False,
}

AXES = ("rep", "dp", "tp", "cp", "pp")
KEYS = {
    "dp": "parallelism.data_parallel_shard_degree",
    "rep": "parallelism.data_parallel_replicate_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "method": "parallelism.context_parallel_method",
    "balancer": "parallelism.context_parallel_load_balancer",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "rows": "parallelism.pipeline_parallel_microbatch_size",
    "modules": "parallelism.module_fqns_per_model_part",
    "disable_loss_parallel": "parallelism.disable_loss_parallel",
    "offloaded": "training.enable_cpu_offload",
    "chunks": "loss.chunks",
}
# Large enough to be seen beside the cross entropy.
LOSS_OPTIONS = {
    "label_smoothing": ("--loss.smoothing=0.3",),
    "z_loss": ("--loss.z_weight=0.05", "--loss.smoothing=0.2"),
}
SCHEDULES = (
    *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)


@dataclass(frozen=True)
class Model:
    """What decides the numbers: the configuration without its layout."""

    family: str = "llama3"
    layers: int = 4
    tied: bool = False
    rows: int = 8
    dtype: str = "float32"
    loss: str = "cross_entropy"
    packing: str = "concat"

    def argv(self) -> list[str]:
        known = {key.name for key in dataclasses.fields(MODELS.get(self.family).args_cls)}
        sizes = SIZES | {"n_layers": self.layers, "tie_word_embeddings": self.tied}
        return [
            f"--model.name={self.family}",
            *(f"--model.args.{key}={value_text(value)}" for key, value in sizes.items() if key in known),
            f"--training.global_batch_size={self.rows}",
            f"--training.mixed_precision_param={self.dtype}",
            f"--loss.name={self.loss}",
            f"--data.packing={self.packing}",
            *LOSS_OPTIONS.get(self.loss, ()),
        ]

    @property
    def tolerance(self) -> dict[str, float]:
        return TOLERANCE if self.dtype == "float32" else BF16_TOLERANCE


@dataclass(frozen=True)
class Layout:
    """How ``model`` is run: parallelism keys by their short names, and in how many batches a rank takes its rows."""

    keys: Mapping[str, Any]
    model: Model = Model()
    batches: int = 1

    @property
    def ranks(self) -> int:
        return math.prod(self.keys.get(axis, 1) for axis in AXES)

    @property
    def name(self) -> str:
        words = [name if value is True else f"{name} {value}" for name, value in self.keys.items() if name != "modules"]
        words += ["stages by name"] if "modules" in self.keys else []
        for key in dataclasses.fields(Model):
            value = getattr(self.model, key.name)
            if value != key.default:
                words.append({int: f"{value} {key.name}", bool: key.name}.get(type(value), str(value)))
        words += [f"{self.batches} batches"] if self.batches > 1 else []
        return ", ".join(words) or "one process"

    def argv(self) -> list[str]:
        readers = self.keys.get("dp", 1) * self.keys.get("rep", 1)
        local = math.ceil(self.model.rows / readers / self.batches)
        rows = self.keys.get("rows", 1)
        return [
            *self.model.argv(),
            f"--training.local_batch_size={math.ceil(local / rows) * rows}",
            *(f"--{KEYS[name]}={value_text(value)}" for name, value in self.keys.items()),
        ]


def _axes(*names: str, **more: Any) -> dict[str, Any]:
    return dict.fromkeys(names, 2) | more


def all_layouts() -> list[Layout]:
    """The whole matrix."""
    deep, long = Model(layers=8), Model(layers=8, rows=24)
    singles = [
        *({axis: degree} for axis in ("dp", "rep", "tp", "cp") for degree in (2, 4)),
        *({"cp": degree, "method": "ulysses"} for degree in (2, 4)),
        *({"cp": degree, "balancer": "none"} for degree in (2, 4)),
        *({"dp": 4, "reshard": reshard} for reshard in ("always", "never")),
        {"tp": 2, "disable_loss_parallel": True},
        {"offloaded": True},
    ]
    schedules = [{"pp": degree, "schedule": schedule} for degree in (2, 4) for schedule in SCHEDULES]
    combined = [
        *(_axes(*axes) for number in (2, 3) for axes in itertools.combinations(AXES, number)),
        _axes("tp", "cp", method="ulysses"),
        _axes("tp", "pp", schedule="ZBVZeroBubble"),
        _axes("tp", "pp", schedule="InterleavedZeroBubble"),
        _axes("cp", "pp", method="ulysses", schedule="ZBVZeroBubble"),
        _axes("dp", "pp", schedule="DualPipeV"),
        _axes("dp", "pp", rows=2),
        _axes("dp", "pp", reshard="always"),
        _axes("tp", "cp", "pp", method="ulysses", schedule="Interleaved1F1B"),
        _axes("dp", "tp", "cp", "pp", schedule="1F1B"),
        _axes("dp", "tp", "cp", "pp", schedule="ZBVZeroBubble"),
    ]
    tied = [
        *(_axes(axis) for axis in ("dp", "tp", "cp", "pp")),
        *({"pp": 2, "schedule": schedule} for schedule in ("ZBVZeroBubble", "Interleaved1F1B")),
        *(_axes("dp", "tp", *pipeline) for pipeline in ((), ("pp",))),
    ]
    # Every other family, as its name alone allows.
    families = [
        Layout(keys, Model(family))
        for family in MODELS.names()
        if family != Model().family
        for keys in (
            *(_axes(*axes) for axes in (("tp",), ("pp",), ("cp",), ("dp", "tp"), ("tp", "pp"), ("tp", "cp", "pp"))),
            _axes("cp", method="ulysses"),
        )
    ]
    families += [Layout(_axes("tp", "pp"), replace(layout.model, tied=True)) for layout in families if layout.ranks > 4]
    # Rows in which no document sees another.
    packed = Model(packing="documents")
    documents = [
        *(Layout(_axes(axis), packed) for axis in ("dp", "tp", "cp", "pp")),
        *(Layout({"cp": 2, **more}, packed) for more in ({"balancer": "none"}, {"method": "ulysses"})),
        *(Layout({"pp": 2, "schedule": schedule}, replace(packed, layers=8)) for schedule in SCHEDULES),
        *(Layout(_axes(*axes), packed) for axes in (("tp", "cp"), ("cp", "pp"), ("tp", "cp", "pp"))),
        Layout(_axes("tp", "cp", "pp", method="ulysses", schedule="ZBVZeroBubble"), packed),
        *(Layout(_axes(axis), replace(packed, family="gpt2")) for axis in ("tp", "cp", "pp")),
        *(Layout(_axes(*axes), Model(packing="best_fit"), batches=2) for axes in (("dp",), ("cp", "pp"))),
    ]
    # Head and loss in pieces that do not divide the tokens; the first ones have no labels.
    chunked = [
        *(Layout(keys | {"chunks": 7}) for keys in ({}, *(_axes(axis) for axis in AXES), _axes("tp", "cp", "pp"))),
        Layout({"chunks": 7}, batches=2),
        Layout({"tp": 2, "disable_loss_parallel": True, "chunks": 7}),
        Layout({"tp": 2, "chunks": 7}, Model(loss="smoothed")),
        *(Layout({"tp": 4, "chunks": 7}, Model(loss=loss)) for loss in LOSS_OPTIONS),
        *(Layout({"dp": 2, "reshard": reshard, "chunks": 7}, Model(tied=True)) for reshard in ("always", "never")),
        Layout({"dp": 2, "reshard": "always", "chunks": 7}),
        *(Layout(_axes(axis, chunks=7), Model(tied=True)) for axis in ("tp", "pp")),
        *(Layout({"pp": 2, "schedule": schedule, "chunks": 7}, deep) for schedule in SCHEDULES),
        Layout({"cp": 2, "method": "ulysses", "chunks": 7}),
        Layout({"cp": 2, "chunks": 7}, packed),
        *(Layout({"tp": 2, "chunks": 7}, Model(family)) for family in MODELS.names() if family != Model().family),
        *(Layout({**keys, "chunks": 7}, Model(dtype="bfloat16")) for keys in ({"dp": 2}, {"tp": 2})),
    ]
    stages = [["tok_embeddings", "layers.0"], [*(f"layers.{i}" for i in (1, 2, 3)), "norm", "output"]]
    return [
        *(Layout(keys) for keys in singles),
        *(Layout(_axes(*axes), batches=2) for axes in ((), ("dp",))),
        *(Layout(keys, deep) for keys in schedules),
        *(Layout(keys, long, batches=3) for keys in schedules),
        *(Layout(keys) for keys in combined),
        Layout(_axes("dp", "pp", schedule="Interleaved1F1B"), Model(rows=24), batches=3),
        *families,
        *documents,
        *chunked,
        *(Layout(keys, Model(tied=True)) for keys in tied),
        Layout({"pp": 2}, Model(tied=True, rows=24), batches=3),
        *(Layout(_axes(*axes), Model(loss="smoothed")) for axes in (("tp",), ("tp", "pp"))),
        *(Layout(keys, Model(loss=loss)) for loss in LOSS_OPTIONS for keys in ({"tp": 4}, _axes("tp", "cp", "pp"))),
        Layout({"tp": 2, "disable_loss_parallel": True}, Model(loss="z_loss")),
        # Sizes that the degrees do not divide.
        Layout({"pp": 2}, Model(layers=5)),
        Layout({"pp": 4}, Model(layers=7)),
        Layout({"pp": 2, "schedule": "ZBVZeroBubble"}, Model(layers=5)),
        Layout({"pp": 2, "modules": stages}),
        Layout({"dp": 3}, Model(rows=7)),
        Layout({"dp": 3, "pp": 2, "rows": 2}, Model(rows=7)),
        *(Layout(_axes(*axes), Model(dtype="bfloat16")) for axes in (("dp",), ("tp",), ("cp",), ("pp",), AXES[2:])),
    ]


def short_form() -> list[Layout]:
    """What fits a test run of minutes: every axis, method and schedule, every pair of axes, and some of the rest; of
    other families every axis, and one pair with tied embeddings; of packed documents every axis and method."""
    large = {"tp 2, cp 2, pp 2", "dp 2, tp 2, pp 2, tied", "dp 2, tp 2, cp 2, pp 2, schedule ZBVZeroBubble"}
    # Of 4 ranks what 2 show, and the pairs do: copies, contiguous shares, schedules that only order the same stages.
    again = {"rep 4", "cp 4, balancer none"}
    again |= {f"pp 4, schedule {name}, 8 layers" for name in ("GPipe", "LoopedBFS", "InterleavedZeroBubble")}
    accumulating = {("1F1B", 2), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 4)}

    in_chunks = {
        *("chunks 7, 2 batches", "dp 2, reshard always, chunks 7, tied", "tp 2, chunks 7", "cp 2, chunks 7"),
        *("tp 2, disable_loss_parallel, chunks 7", "pp 2, chunks 7, tied"),
        "pp 2, schedule InterleavedZeroBubble, chunks 7, 8 layers",
    }

    def fits(layout: Layout) -> bool:
        if "chunks" in layout.keys:
            return layout.name in in_chunks
        if layout.model.packing != "concat":  # directly against documents alone: test_documents.py
            return layout.ranks == 2 and layout.model.family == "llama3" and layout.model.layers == 4
        if layout.ranks > 4:
            return layout.name in large
        if layout.name in again:
            return False
        if layout.ranks == 4 and layout.model.family != Model().family:
            return layout.model.tied
        return layout.batches < 3 or (layout.keys.get("schedule", "1F1B"), layout.keys["pp"]) in accumulating

    return [layout for layout in all_layouts() if fits(layout)]


@dataclass
class Record:
    """What a run was: initial weights, gradients of the first step and names of those that are not equal to the bit
    where they have to be, loss and norm of every step and the loss of an evaluation at the end, dtypes of the linear
    maps, duration."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    unequal: list[str] = field(default_factory=list)
    seconds: float = 0.0


def largest_difference(got: Record, expected: Record) -> dict[str, float]:
    """Of losses, of norms relative to their size, and of each parameter's gradient relative to its norm.

    A gradient that is zero but for rounding, as that of a bias of keys that are not rotated, need only be that again.
    """
    rounding = 1e-6 * expected.norms[0]

    def relative(a: Tensor, b: Tensor) -> float:
        if b.norm() < rounding:
            return 0.0 if a.norm() < rounding else math.inf
        return float((a - b).norm() / b.norm())

    assert set(got.gradients) == set(expected.gradients)
    return {
        "loss": max(abs(a - b) for a, b in zip(got.losses, expected.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(got.norms, expected.norms, strict=True)),
        "gradient": max(relative(got.gradients[name], expected.gradients[name]) for name in expected.gradients),
    }


def ignore_labels(batches: Sequence[Batch], first_row: int, rows: int) -> list[Batch]:
    """The batches of a reader whose first row is ``first_row`` of ``rows``, with labels missing by what they hold."""
    masked = []
    for batch in batches:
        labels = batch.labels.clone()
        labels[(batch.tokens * 7 + batch.positions) % 6 == 0] = IGNORE_INDEX
        labels[batch.tokens[:, 0] % 4 == 1] = IGNORE_INDEX
        labels[: max(0, rows // 4 - first_row)] = IGNORE_INDEX
        first_row += labels.shape[0]
        masked.append(dataclasses.replace(batch, labels=labels))
    return masked


@torch.no_grad()
def widen(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Wide weights, drawn by name: with fresh ones a wrong position changes the logits by 1e-5 only."""
    for name, parameter in named_parameters:
        spread = 0.3 if "norm" in name else parameter.shape[-1] ** -0.5
        offset = 1.0 if "norm" in name else 0.0
        for chunk in parameter.__create_chunk_list__():
            wide = draw(name, parameter.shape, Normal(spread), 1, chunk.offsets, chunk.sizes)
            parameter.to_local().copy_(wide + offset)


def run(world: World, argv: list[str], sabotage: str | None = None) -> Record | None:
    """Train a few steps on all ranks; the record is rank 0's."""
    start = time.perf_counter()
    with SABOTAGE[sabotage]():
        record = _run(world, argv)
    if record is not None:
        record.seconds = time.perf_counter() - start
    return record


def _run(world: World, argv: list[str]) -> Record | None:
    job = resolve_job(load_config(argv), world.size)
    trainer = Trainer(job, world)
    named = trainer.runner.named_parameters
    degrees = job.spread.degrees
    record = Record(initial=whole_parameters({name: p.detach() for name, p in named}, world))
    widen(named)
    trainer.weights_changed()

    def note(module: nn.Module, inputs: Any, out: Tensor) -> None:
        if not torch.compiler.is_compiling():  # whose graphs it would break
            record.dtypes.add(out.dtype)

    for part in trainer.runner.parts:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(note)

    def keep(*_: Any) -> None:
        if not record.gradients:
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            record.unequal = unequal_replicas(gradients, world)
            record.gradients.update(whole_parameters(gradients, world))

    trainer.optimizer.register_step_pre_hook(keep)
    rows = trainer.state.global_batch_size
    first_row = trainer.topology.reader_rank * -(-rows // degrees.readers)
    steps = iter(trainer.loader)
    for _ in range(trainer.steps):
        batches = ignore_labels(next(steps), first_row, rows)
        (counted,) = world.sum([sum(b.num_valid() for b in batches)])
        loss, norm = trainer.train_step(batches, counted / degrees.copies)
        record.losses.append(world.sum([float(loss)])[0] / degrees.tensor)
        record.norms.append(float(norm))
    # What the last step's rows give now, without training on them.
    evaluated = sum(float(trainer.runner.evaluate(batch, counted / degrees.copies)) for batch in batches)
    record.losses.append(world.sum([evaluated])[0] / degrees.tensor)
    trainer.close()
    return record if world.rank == 0 else None


def unequal_replicas(gradients: Mapping[str, Tensor], world: World) -> list[str]:
    """Names of gradients of which the same part lies on several ranks and is not the same to the bit."""
    mine = {}
    for name, gradient in gradients.items():
        assert isinstance(gradient, DTensor)
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in gradient.__create_chunk_list__()]
        mine[(name, tuple(chunks))] = hashlib.sha256(gradient.to_local().contiguous().numpy().tobytes()).hexdigest()
    seen: dict[Any, str] = {}
    everyones = [item for theirs in world.gather(mine) for item in theirs.items()]
    return sorted({part[0] for part, digest in everyones if seen.setdefault(part, digest) != digest})


def run_all(
    world: World, base: Sequence[str], layouts: Sequence[Layout], sabotage: str | None = None
) -> list[Record] | None:
    """Each layout in turn, in the same processes."""
    records = [run(world, [*base, *layout.argv()], sabotage) for layout in layouts]
    return [r for r in records if r is not None] if world.rank == 0 else None


def base_argv(folder: Path, steps: int = STEPS) -> list[str]:
    """The configuration that all layouts share, on text written into ``folder``."""
    lines = (json.dumps({"text": f"{n} times {n} is {n * n}; and " * (1 + n % 5)}) for n in range(200))
    (folder / "text.jsonl").write_text("\n".join(lines))
    written = [f"--training.dataset_path={folder / 'text.jsonl'}", f"--job.dump_folder={folder / 'run'}"]
    return [*BASE, f"--training.steps={steps}", *written]


# Faults put in on purpose: the comparison must see each of them.

FAULTS = {
    "a mean of means": "dp 2",
    "a norm's gradient is not reduced": "tp 2",
    "positions are shifted by one": "cp 2",
    "a micro-batch is dropped": "pp 2, schedule 1F1B, 8 layers",
}
"""Each fault, and the layout that has it."""


@contextmanager
def _unreduced_norm() -> Iterator[None]:
    with mock.patch.object(tensor, "sum_gradients", lambda parameters, group: None):
        yield


@contextmanager
def _shifted_positions() -> Iterator[None]:
    take = ContextSplit.take

    def shifted(self: ContextSplit, batch: Batch) -> Batch:
        part = take(self, batch)
        return dataclasses.replace(part, positions=part.positions + self.axis.rank)

    with mock.patch.object(ContextSplit, "take", shifted):
        yield


@contextmanager
def _dropped_micro_batch() -> Iterator[None]:
    share, calls = PipelineRunner._share, itertools.count()

    def dropping(self: PipelineRunner, logits: Tensor, labels: Tensor) -> Tensor:
        return share(self, logits, labels) * (next(calls) % 8 != 5)

    with mock.patch.object(PipelineRunner, "_share", dropping):
        yield


@contextmanager
def _mean_of_means() -> Iterator[None]:
    forward = WholeRunner._forward

    def own_mean(self: WholeRunner, batch: Batch, num_valid: float) -> Tensor:
        return forward(self, batch, 2.0 * max(batch.num_valid(), 1))

    with mock.patch.object(WholeRunner, "_forward", own_mean):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


SABOTAGE = {
    None: _nothing,
    "a norm's gradient is not reduced": _unreduced_norm,
    "positions are shifted by one": _shifted_positions,
    "a micro-batch is dropped": _dropped_micro_batch,
    "a mean of means": _mean_of_means,
}
