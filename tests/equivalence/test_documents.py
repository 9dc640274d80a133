"""A row of several documents against each of them alone: loss and every parameter's gradient to 1e-5, in one process
and spread, and what one document says moves nothing of another, to the bit."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.equivalence.layouts import Layout, Model, base_argv, largest_difference, widen
from tests.equivalence.layouts import Record as Numbers
from tests.launch import run_ranks
from tests.runs import whole_parameters
from torchtitan.config import load_config
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.context import apply_mask
from torchtitan.distributed.world import World
from torchtitan.models.spec import MODELS
from torchtitan.resolve.job import resolve_job
from torchtitan.resolve.model import resolve_args
from torchtitan.trainer import Trainer

# Tokens of the documents beside BOS and EOS, over rows of 32: inside one, longer than several, hardly any.
LENGTHS = [3, 100, 1, 17, 30, 0, 31, 9, 2, 12, 29, 5]
PACKINGS = ("documents", "best_fit")
FAMILIES = ("llama3", "gpt2")
PAIRS = tuple(zip(PACKINGS, FAMILIES, strict=True))


@dataclass(frozen=True)
class Case:
    """How packed rows are run; ``fault`` names what is spoiled."""

    keys: dict[str, Any]
    packing: str = "best_fit"
    family: str = "llama3"
    compiled: bool = False
    fault: str | None = None

    def layout(self) -> Layout:
        return Layout(self.keys, Model(self.family, packing=self.packing))


ONE = [Case({}, packing, family) for packing, family in PAIRS] + [Case({}), Case({}, compiled=True)]
TWO = [
    *(Case({axis: 2}, packing, family) for axis in ("tp", "pp", "cp") for packing, family in PAIRS),
    *(Case({"cp": 2, "method": "ulysses"}, packing) for packing in PACKINGS),
    Case({"cp": 2, "balancer": "none"}),
    Case({"cp": 2}, compiled=True),
]
FAULTS = [
    Case({}, fault="the mask is causal"),
    Case({}, fault="positions run on"),
    Case({}, "documents", fault="labels cross from document to document"),
    Case({}, family="gpt2", fault="a document counts from 1"),
    Case({"cp": 2}, fault="the mask is causal"),
    Case({"cp": 2, "method": "ulysses"}, fault="the mask is causal"),
]


def spoiled(batch: Batch, fault: str | None) -> Batch:
    tokens, labels, positions = batch.tokens, batch.labels.clone(), batch.positions
    run_on = torch.arange(tokens.shape[1]).expand_as(tokens)
    if fault == "positions run on":
        positions = run_on
    elif fault == "labels cross from document to document":
        crossing = positions[:, 1:] == 0
        labels[:, :-1][crossing] = tokens[:, 1:][crossing]
    elif fault == "a document counts from 1":  # not where one of a single token would become a part of the one after
        positions = positions + (run_on - positions == 0) * (positions[:, 1:2] == 1)
    return replace(batch, labels=labels, positions=positions)


def alone(batch: Batch) -> list[Batch]:
    """Each document of the rows by itself, padding as well: ``[1, tokens]``."""
    documents = []
    for row in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        edges = [*(row[2] == 0).nonzero().flatten().tolist(), len(row[2])]
        for start, end in itertools.pairwise(edges):
            document = Batch(*(part[None, start:end] for part in row))
            assert document.positions.equal(torch.arange(end - start)[None])
            documents.append(document)
    return documents


def numbers(world: World, base: Sequence[str], case: Case, apart: bool = False) -> Numbers:
    """Loss and gradients of a whole epoch of rows at once; ``apart``: of their documents one by one, where attention
    is causal."""
    job = resolve_job(load_config([*base, *case.layout().argv()]), world.size)
    if apart or case.fault == "the mask is causal":
        job = replace(job, spread=replace(job.spread, mask="causal"))
    trainer = Trainer(job, world)
    named = trainer.runner.named_parameters
    widen(named)
    if case.compiled:
        for part in trainer.runner.parts:
            for block in part.get_submodule(job.spec.layout.blocks).children():
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    (batch,) = next(iter(trainer.loader))
    assert (batch.positions[:, 1:] == 0).any(-1).sum() > 2, "hardly a row has several documents"
    assert case.packing == "documents" or (batch.labels == IGNORE_INDEX).any(), "no row has padding"
    num_valid = batch.num_valid()
    batches = alone(batch) if apart else [spoiled(batch, case.fault)]
    loss = trainer.runner.forward_backward(batches, num_valid)
    gradients = whole_parameters({name: p.grad for name, p in named if p.grad is not None}, world)
    trainer.close()
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    losses = [world.sum([float(loss)])[0] / job.spread.degrees.tensor]
    return Numbers(gradients=gradients, losses=losses, norms=[norm])


def all_numbers(world: World, base: Sequence[str], cases: Sequence[Case], apart: bool = False) -> list[Numbers]:
    return [numbers(world, base, case, apart) for case in cases]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("documents")
    argv = base_argv(folder)
    texts = ("".join(chr(32 + (7 * n + n * i + i * i) % 90) for i in range(length)) for n, length in enumerate(LENGTHS))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return [*argv, f"--data.cache_folder={folder}"]


@pytest.fixture(scope="module")
def references(base: list[str]) -> dict[tuple[str, str], Numbers]:
    cases = [Case({}, *pair) for pair in dict.fromkeys((case.packing, case.family) for case in (*ONE, *TWO, *FAULTS))]
    found = run_ranks(all_numbers, 1, base, cases, True)[0]
    return {(case.packing, case.family): got for case, got in zip(cases, found, strict=True)}


@pytest.mark.parametrize("cases", [ONE, TWO], ids=["one process", "2 ranks"])
def test_a_packed_row_is_the_sum_of_its_documents(
    base: list[str], references: dict[tuple[str, str], Numbers], cases: list[Case]
) -> None:
    found = run_ranks(all_numbers, cases[0].layout().ranks, base, cases, timeout=280)[0]
    wrong = []
    for case, got in zip(cases, found, strict=True):
        difference = largest_difference(got, references[case.packing, case.family])
        name = case.layout().name + ", compiled" * case.compiled
        print(f"{name:40s} " + "  ".join(f"{key} {value:.1e}" for key, value in difference.items()))
        wrong += [name for value in difference.values() if value > 1e-5]
    assert not wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_comparison_sees(base: list[str], references: dict[tuple[str, str], Numbers], ranks: int) -> None:
    cases = [case for case in FAULTS if case.layout().ranks == ranks]
    for case, got in zip(cases, run_ranks(all_numbers, ranks, base, cases)[0], strict=True):
        difference = largest_difference(got, references[case.packing, case.family])["gradient"]
        print(f"{case.layout().name}: {case.fault}: gradient {difference:.1e}")
        assert difference > 1e-2, case


@pytest.mark.parametrize("family", MODELS.names())
@torch.no_grad()
def test_a_document_moves_no_logit_of_another(family: str) -> None:
    spec = MODELS.get(family)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 8, "vocab_size": 101, "max_seq_len": 32}
    args = resolve_args(spec, "debugmodel", {k: v for k, v in sizes.items() if k in spec.args_cls.__dataclass_fields__})
    torch.manual_seed(0)
    model = spec.cls(args)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    apply_mask(model, spec.layout, "documents")
    positions = torch.cat([torch.arange(length) for length in (11, 14, 7)])[None]
    tokens = torch.randint(101, positions.shape)
    inside = torch.zeros(32, dtype=torch.bool)
    for start, end in ((0, 11), (11, 25), (25, 32)):
        changed = tokens.clone()
        changed[0, start:end] = (changed[0, start:end] + 1) % 101
        inside[:] = False
        inside[start:end] = True
        before, after = model(tokens, positions)[0], model(changed, positions)[0]
        assert torch.equal(before[~inside], after[~inside])
        assert (before[inside] != after[inside]).any(-1).all()
        lone: Tensor = model(tokens[:, start:end], torch.arange(end - start)[None])[0]
        assert float((lone - before[inside]).abs().max()) < 1e-4 * float(before.abs().max())
