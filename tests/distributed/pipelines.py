"""A pipeline beside the whole model in one process: builds both, runs steps and evaluations, notes what differs.

Which pipelines are run is in ``test_pipeline.py``. Weights are wide and labels are missing in uneven numbers, so that a
micro-batch too few or too many is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.fsdp import Precision, apply_fsdp
from torchtitan.distributed.pipeline import PipelineRunner, prune
from torchtitan.distributed.runner import Seams
from torchtitan.distributed.stages import plan_pipeline
from torchtitan.distributed.topology import Degrees, Topology, build_topology
from torchtitan.distributed.world import World
from torchtitan.loss.losses import cross_entropy
from torchtitan.models.decoder import tied
from torchtitan.models.init import Normal, draw
from torchtitan.models.llama3 import Llama3, Llama3Args
from torchtitan.models.spec import MODELS

VOCAB = 101


@dataclass(frozen=True)
class Case:
    """A pipeline of ``ranks``, ``shard`` of which hold a shard of each stage, and the batches of its steps."""

    schedule: str = "1F1B"
    layers: int = 4
    tie: bool = False
    shard: int = 1
    rows: int = 4
    micro_batch_size: int = 1
    steps: tuple[int, ...] = (1, 3)
    lists: Any = None
    layers_per_stage: int | None = None
    csv: str = ""
    shapes: tuple[tuple[int, int], ...] = ()
    """Rows and tokens of further batches, for training and evaluation by turns."""

    @property
    def args(self) -> Llama3Args:
        return Llama3Args(
            dim=32,
            n_layers=self.layers,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=VOCAB,
            multiple_of=16,
            tie_word_embeddings=self.tie,
        )


def batch(seed: int, rows: int, seq: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, seq + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(rows, seq, generator=generator) < 0.3] = IGNORE_INDEX
    positions = torch.arange(seq).repeat(rows, 1)
    positions[:, seq // 2 :] -= seq // 3
    return Batch(tokens[:, :-1], labels, positions)


def part_of(whole: Batch, rank: int, ranks: int) -> Batch:
    return Batch(*(t.chunk(ranks)[rank] for t in (whole.tokens, whole.labels, whole.positions)))


@torch.no_grad()
def widen(model: nn.Module, names: dict[str, str]) -> None:
    """Wide weights by name, so that attention is far from uniform and layers differ."""
    for name, parameter in model.named_parameters():
        name = names.get(name, name)
        spread, offset = (0.3, 1.0) if "norm" in name else (1.5 / parameter.shape[-1] ** 0.5, 0.0)
        chunks = parameter.__create_chunk_list__() if hasattr(parameter, "__create_chunk_list__") else None
        boxes = [(c.offsets, c.sizes) for c in chunks] if chunks else [([0] * parameter.dim(), parameter.shape)]
        for offsets, sizes in boxes:
            local = parameter.to_local() if chunks else parameter
            local.copy_(draw(name, parameter.shape, Normal(spread), 1, offsets, sizes) + offset)


class Reference:
    """The whole model in this process."""

    def __init__(self, args: Llama3Args) -> None:
        self.model = Llama3(args)
        widen(self.model, {})

    def step(self, batches: Sequence[Batch], num_valid: float) -> tuple[float, dict[str, Tensor]]:
        self.model.zero_grad()
        loss = torch.stack([self.loss(b, num_valid) for b in batches]).sum()
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def loss(self, whole: Batch, num_valid: float) -> Tensor:
        return cross_entropy()(self.model(whole.tokens, whole.positions), whole.labels) / num_valid


def build(case: Case, topology: Topology, loss: Callable[[Tensor, Tensor], Tensor]) -> PipelineRunner:
    """A runner as the house makes it: on meta, cut, sharded, filled by name."""
    spec, axis = MODELS.get("llama3"), topology.pipeline
    assert axis is not None
    plan = plan_pipeline(
        spec.layout,
        [str(i) for i in range(case.layers)],
        degree=axis.size,
        schedule=case.schedule,
        csv=case.csv,
        layers_per_stage=case.layers_per_stage,
        module_fqns=case.lists,
    )
    names = dict(tied(case.args))
    parts = []
    for modules in plan.stages_of(axis.rank):
        part = spec.build_meta(case.args)
        prune(part, spec.layout, modules)
        precision = Precision(param=torch.float32)
        apply_fsdp(
            part, spec.layout, topology.fsdp, precision=precision, reshard="never", cpu_offload=False, tied=False
        )
        part.to_empty(device="cpu")
        widen(part, names)
        parts.append(part)
    return PipelineRunner(
        plan,
        parts,
        axis,
        Seams(loss, take=lambda whole: part_of(whole, topology.reader_rank, case.shard)),
        device=torch.device("cpu"),
        micro_batch_size=case.micro_batch_size,
        tied=names,
    )


def clear(runner: PipelineRunner) -> None:
    for part in runner.parts:
        part.zero_grad()


def gradients(runner: PipelineRunner) -> list[tuple[str, Tensor]]:
    return [(name, p.grad.full_tensor().clone()) for name, p in runner.named_parameters if p.grad is not None]


@dataclass
class Outcome:
    """The largest differences to one process, and what must be so on this rank."""

    loss: float = 0.0
    gradient: float = 0.0
    evaluation: float = 0.0
    exact: dict[str, bool] = field(default_factory=dict)

    def compare(self, runner: PipelineRunner, loss: float, expected: tuple[float, dict[str, Tensor]]) -> None:
        self.loss = max(self.loss, abs(loss - expected[0]))
        got = gradients(runner)
        self.exact["all gradients"] = self.exact.get("all gradients", True) and len(got) == len(runner.named_parameters)
        for name, grad in got:
            wanted = expected[1][name]
            self.gradient = max(self.gradient, float((grad - wanted).norm() / wanted.norm()))

    def note(self, name: str, holds: bool) -> None:
        self.exact[name] = self.exact.get(name, True) and holds


def run_case(world: World, case: Case, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Outcome:
    topology = build_topology(Degrees(pipeline=world.size // case.shard, shard=case.shard), world)
    runner, reference, outcome = build(case, topology, loss or cross_entropy()), Reference(case.args), Outcome()
    rows = case.rows * case.shard

    def evaluate(seed: int, rows: int, seq: int = 12, times: int = 1) -> None:
        before, held = batch(seed, rows, seq), gradients(runner)
        with torch.no_grad():
            expected = float(reference.loss(before, before.num_valid()))
        losses = [world.sum([float(runner.evaluate(before, before.num_valid()))])[0] for _ in range(times)]
        outcome.note("evaluation repeats", len(set(losses)) == 1)
        outcome.evaluation = max(outcome.evaluation, abs(losses[0] - expected))
        kept = gradients(runner)
        outcome.note("evaluation leaves gradients", len(kept) == len(held))
        for (_, a), (_, b) in zip(kept, held, strict=True):
            outcome.note("evaluation leaves gradients", torch.equal(a, b))

    def train(batches: list[Batch]) -> None:
        clear(runner)
        num_valid = sum(b.num_valid() for b in batches)
        share = runner.forward_backward(batches, num_valid)
        outcome.note("detached", not share.requires_grad)
        outcome.compare(runner, world.sum([float(share)])[0], reference.step(batches, num_valid))

    evaluate(100, 2 * case.shard * case.micro_batch_size, times=2)
    with torch.no_grad():
        for parameter in (*(p for _, p in runner.named_parameters), *reference.model.parameters()):
            parameter.mul_(1.1)  # as a loaded checkpoint would: nothing may be left of the old weights
    evaluate(100, 2 * case.shard * case.micro_batch_size)
    for number, accumulate in enumerate(case.steps):
        train([batch(10 * number + i, rows) for i in range(accumulate)])
        evaluate(101 + number, rows)
    for number, (rows, seq) in enumerate(case.shapes):
        train([batch(50 + number, rows, seq), batch(60 + number, rows, seq + 4)])
        evaluate(110 + number, rows - 1, seq)
    if case.tie:
        copies = [g for name, g in gradients(runner) if name == "tok_embeddings.weight"]
        last = len(runner.duplicates)
        outcome.note("one name for both copies", "output.weight" not in dict(runner.named_parameters))
        outcome.note("duplicates", last == int(axis_has_last(runner)))
        outcome.note("copies are bit-equal", bits_agree(world, copies, topology))
    return outcome


def axis_has_last(runner: PipelineRunner) -> bool:
    return isinstance(runner.parts[-1].output, nn.Linear)


def bits_agree(world: World, copies: list[Tensor], topology: Topology) -> bool:
    """Whether the gradients of both copies of the tied weight are the same on the ranks that have one."""
    sums = [float(copy.double().sum()) for copy in copies]
    most = world.sum([sum(sums), float(len(sums))])
    return all(abs(s - most[0] / most[1]) == 0.0 for s in sums) and all(torch.equal(copies[0], c) for c in copies)
