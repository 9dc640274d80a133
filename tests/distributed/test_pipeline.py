"""Pipelines against one process: losses, every gradient, evaluation between steps, tied weights, shapes that change.

Weights are wide and labels are missing in uneven numbers, so that a micro-batch too few or too many is seen.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tests.distributed.test_schedules import of_torch
from tests.launch import run_ranks
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.fsdp import Precision, apply_fsdp
from torchtitan.distributed.pipeline import PassOn, PipelineRunner, prune
from torchtitan.distributed.schedules import Action
from torchtitan.distributed.stages import plan_pipeline
from torchtitan.distributed.topology import Degrees, Topology, build_topology
from torchtitan.distributed.world import World
from torchtitan.loss import cross_entropy
from torchtitan.models.init import Normal, draw
from torchtitan.models.llama3 import Llama3, Llama3Args, tied
from torchtitan.models.spec import MODELS

TOLERANCE = 1e-5
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
        device=torch.device("cpu"),
        loss=loss,
        micro_batch_size=case.micro_batch_size,
        take=lambda whole: part_of(whole, topology.reader_rank, case.shard),
        loss_context=contextlib.nullcontext,
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


def run_cases(world: World, cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: run_case(world, case) for name, case in cases.items()}


def check(results: list[dict[str, Outcome]]) -> None:
    for name in results[0]:
        for rank, outcomes in enumerate(results):
            got = outcomes[name]
            print(f"{name:40s} rank {rank}  {got.loss:.1e} {got.gradient:.1e} {got.evaluation:.1e}")
            assert max(got.loss, got.gradient, got.evaluation) <= TOLERANCE, (name, rank, got)
            assert all(got.exact.values()), (name, rank, got)


UNEVEN = [["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "norm", "output"]]
NO_LAYERS = [["tok_embeddings"], ["layers.0", "layers.1"], ["layers.2", "layers.3"], ["norm", "output"]]


def dump(folder: Path, name: str, ranks: int, n: int) -> str:
    path = str(folder / f"{name}-{ranks}.csv")
    of_torch(name, ranks, 2 * ranks, n)._dump_csv(path, "compute_only")
    return path


def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    neighbours, halves = tmp_path / "neighbours.csv", tmp_path / "halves.csv"
    neighbours.write_text("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,3F0,3B0,2B0,2F1,3F1,3B1,2B1\n")
    halves.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    cases = {
        "1F1B": Case(layers=5, rows=3, shapes=((4, 16), (2, 8))),
        "GPipe, tied": Case("GPipe", layers=5, tie=True),
        "Interleaved1F1B": Case("Interleaved1F1B", layers=5),
        "LoopedBFS, three a rank": Case("LoopedBFS", layers=10, layers_per_stage=2, rows=2),
        "InterleavedZeroBubble": Case("InterleavedZeroBubble"),
        "ZBVZeroBubble, tied": Case("ZBVZeroBubble", tie=True, shapes=((4, 16), (2, 8))),
        "DualPipeV": Case("DualPipeV", layers=5, rows=8, micro_batch_size=2),
        "1F1B, tied": Case(tie=True, rows=6, micro_batch_size=2),
        "explicit, uneven": Case(lists=UNEVEN),
        "explicit, no layers at the ends": Case("ZBVZeroBubble", lists=NO_LAYERS),
        "file of ZBVZeroBubble": Case(csv=dump(tmp_path, "ZBVZeroBubble", 2, 3), rows=3),
        "file of Interleaved1F1B": Case(csv=dump(tmp_path, "Interleaved1F1B", 2, 4)),
        "file of DualPipeV, tied": Case(csv=dump(tmp_path, "DualPipeV", 2, 4), tie=True),
        "file with neighbours on a rank": Case(csv=str(neighbours), rows=2),
        "file with halves": Case(csv=str(halves), rows=2),
    }
    check(run_ranks(run_cases, 2, cases))


def test_four_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    cases = {
        "1F1B": Case(layers=7, tie=True),
        "GPipe": Case("GPipe", layers=7, rows=2, steps=(3,)),
        "Interleaved1F1B": Case("Interleaved1F1B", layers=8, rows=3, steps=(2,)),
        "LoopedBFS": Case("LoopedBFS", layers=9, rows=3, steps=(2,)),
        "InterleavedZeroBubble": Case("InterleavedZeroBubble", layers=8, rows=4, steps=(2,)),
        "ZBVZeroBubble": Case("ZBVZeroBubble", layers=8, rows=3, steps=(1, 2)),
        "DualPipeV": Case("DualPipeV", layers=8, rows=8, tie=True, steps=(2,)),
        "file of ZBVZeroBubble": Case(csv=dump(tmp_path, "ZBVZeroBubble", 4, 5), layers=8, rows=5, steps=(2,)),
        "1F1B × shard 2, tied": Case(shard=2, layers=5, tie=True),
        "InterleavedZeroBubble × shard 2": Case("InterleavedZeroBubble", shard=2, rows=2, shapes=((8, 16),)),
        "DualPipeV × shard 2, tied": Case("DualPipeV", shard=2, tie=True, steps=(2,)),
    }
    check(run_ranks(run_cases, 4, cases))


def without_first_micro_batch(world: World, case: Case) -> Outcome:
    """Loses one micro-batch of every flush."""
    whole = cross_entropy()
    first = batch(0, case.rows).labels[:1]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return whole(logits, labels) * (0.0 if torch.equal(labels, first) else 1.0)

    return run_case(world, case, loss)


def test_the_comparison_sees_a_dropped_micro_batch() -> None:
    for schedule in ("1F1B", "ZBVZeroBubble"):
        results = run_ranks(without_first_micro_batch, 2, Case(schedule, steps=(1,)))
        assert min(got.gradient for got in results) > 1000 * TOLERANCE
        assert max(got.loss for got in results) > 1000 * TOLERANCE


def record_actions(world: World, schedules: Sequence[str]) -> dict[str, bool]:
    """Whether each rank computes in the order that the plan tells."""
    seen: list[Action] = []

    def noting(name: str, kind: Callable[[dict[str, Any]], str]) -> Callable[[], None]:
        original = getattr(PipelineStage, name)

        def noted(stage: PipelineStage, chunk: int, *args: Any, **kwargs: Any) -> Any:
            seen.append(Action(kind(kwargs), stage.stage_index, chunk))
            return original(stage, chunk, *args, **kwargs)

        setattr(PipelineStage, name, noted)
        return lambda: setattr(PipelineStage, name, original)

    undo = [
        noting("forward_one_chunk", lambda _: "F"),
        noting("backward_one_chunk", lambda kwargs: "B" if kwargs.get("full_backward", True) else "I"),
        noting("backward_weight_one_chunk", lambda _: "W"),
    ]
    same = {}
    topology = build_topology(Degrees(pipeline=world.size, shard=1), world)
    for name in schedules:
        runner = build(Case(name), topology, cross_entropy())
        seen.clear()
        runner.forward_backward([batch(0, 6)], 10.0)
        steps = runner._plan.order_for(6)[world.rank]
        same[name] = seen == [action for step in steps for action in step]
    for restore in undo:
        restore()
    return same


def test_ranks_compute_in_the_order_that_the_plan_tells() -> None:
    names = ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
    assert run_ranks(record_actions, 2, names) == [dict.fromkeys(names, True)] * 2


def most_logits(world: World, schedules: Sequence[str]) -> dict[str, int]:
    """How many micro-batches' logits are alive at once in an evaluation of eight."""
    most = {}
    topology = build_topology(Degrees(pipeline=world.size, shard=1), world)
    for name in schedules:
        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        counts = [0]

        def loss(logits: Tensor, labels: Tensor, alive: Any = alive, counts: list[int] = counts) -> Tensor:
            alive.add(logits)
            counts.append(sum(1 for _ in alive))
            return logits.sum()

        build(Case(name), topology, loss).evaluate(batch(0, 8), 1.0)
        most[name] = max(counts)
    return most


def test_evaluation_keeps_the_logits_of_two_micro_batches_at_most() -> None:
    results = run_ranks(most_logits, 2, ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
    counts = [count for result in results for count in result.values()]
    assert 1 <= max(counts) <= 2
    assert sorted(counts)[:3] == [0, 0, 0]  # each schedule has one last stage


def test_prune_leaves_what_is_named_and_passes_on_the_rest() -> None:
    spec, args = MODELS.get("llama3"), Case().args
    model = spec.build_meta(args)
    prune(model, spec.layout, ("layers.1", "layers.2"))
    assert list(model.layers) == ["1", "2"]
    assert isinstance(model.tok_embeddings, PassOn) and isinstance(model.output, PassOn)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"layers"}
    hidden = torch.empty(1, 3, args.dim, device="meta")
    assert model(hidden, torch.zeros(1, 3, dtype=torch.int64, device="meta")).shape == hidden.shape


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(AssertionError, match="5 rows cannot be cut into micro-batches of 2"):
        run_ranks(run_case, 2, Case(rows=5, micro_batch_size=2))
