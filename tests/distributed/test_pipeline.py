"""Pipelines against one process: losses, every gradient, evaluation between steps, tied weights, shapes that change."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from tests.distributed.pipelines import Case, Outcome, batch, build, run_case
from tests.distributed.test_schedules import of_torch
from tests.launch import run_ranks
from torchtitan.distributed.pipeline import PassOn, prune
from torchtitan.distributed.schedules import Action
from torchtitan.distributed.topology import Degrees, build_topology
from torchtitan.distributed.world import World
from torchtitan.loss.losses import cross_entropy
from torchtitan.models.spec import MODELS

TOLERANCE = 1e-5


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
