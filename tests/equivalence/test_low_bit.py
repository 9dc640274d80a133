"""Optimizers with states in eight bits, on spread parameters against one process: to the bit where gradients are the
same, and as near as rounding of gradients lets them be where they are the layout's own."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.equivalence.layouts import Layout, Model, base_argv, ignore_labels, unequal_replicas, widen
from tests.launch import RanksFailed, run_ranks
from tests.runs import whole_parameters
from torchtitan.config import load_config
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.whole import boxes
from torchtitan.distributed.world import World
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

# Embedding, head, queries, what comes after attention, and feed-forwards are kept in blocks; keys, values and norms are
# not. The vocabulary of 101 is divided by no degree.
SIZES = ["--model.args.dim=64", "--model.args.ffn_dim=128", "--model.args.head_dim=8"]
OPTIMIZERS = [
    "--optimizer.name=AdamW8bit",
    "--optimizer.block_size=32",
    '--optimizer.groups=[{pattern = "layers.[12].*", name = "AdamFp8", block_size = 32}]',
]
TWO = [*(Layout({axis: 2}) for axis in ("tp", "cp")), Layout({"dp": 2, "offloaded": True})]
TWO += [Layout({"pp": 2}, Model(tied=True))]
FOUR = [Layout({"rep": 2, "dp": 2}), Layout({"tp": 2, "pp": 2}), Layout({"dp": 2, "tp": 2}, Model(tied=True))]
# A number that lies between two codes becomes the other one where rounding has moved its gradient.
TOLERANCE = {"weights": 2e-4, "codes": 1e-3}

Run = tuple[dict[str, Tensor], list[str]]


def argv_of(base: list[str], layout: Layout) -> list[str]:
    return [*base, *layout.argv(), *SIZES, *OPTIMIZERS]


def whole_state(trainer: Trainer, world: World) -> dict[str, Tensor]:
    """Weights and states put together, float8 as the bytes it is."""
    tensors = {name: parameter.detach() for name, parameter in trainer.runner.named_parameters}
    for name, parameter in trainer.runner.named_parameters:
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    return whole_parameters(tensors, world)


def given_gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:6], "little")
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn * drawn.abs() ** 3  # of very different sizes in a block


def by_hand(world: World, argv: list[str]) -> Run:
    """Three updates by gradients that every layout is given alike."""
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    for step in range(1, 4):
        for name, parameter in trainer.runner.named_parameters:
            whole = given_gradient(name, parameter.shape, step)
            parameter.grad = torch.zeros_like(parameter)
            for offsets, sizes in boxes(parameter):  # type: ignore[arg-type]
                box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
                local_part(parameter.grad).copy_(whole[box])
        trainer.update(torch.ones(()))
    trainer.close()
    states = {f"{n}.{k}": v for n, p in trainer.runner.named_parameters for k, v in trainer.optimizer.state[p].items()}
    spread = {name: value for name, value in states.items() if value.dim() and value.dtype != torch.float8_e4m3fn}
    return whole_state(trainer, world), unequal_replicas(spread, world)


def trained(world: World, argv: list[str]) -> Run:
    """Three steps of training."""
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    widen(trainer.runner.named_parameters)
    degrees, rows = trainer.topology.degrees, trainer.state.global_batch_size
    for batches, _ in zip(trainer.loader, range(3), strict=False):
        batches = ignore_labels(batches, trainer.topology.reader_rank * -(-rows // degrees.readers), rows)
        (counted,) = world.sum([sum(b.num_valid() for b in batches)])
        trainer.train_step(batches, counted / degrees.copies)
    trainer.close()
    weights = {name: p.detach() for name, p in trainer.runner.named_parameters}
    return whole_state(trainer, world), unequal_replicas(weights, world)


def run_layouts(world: World, base: list[str], layouts: Sequence[Layout]) -> list[tuple[Run, Run]]:
    found = []
    for layout in layouts:
        argv = argv_of(base, layout)
        found.append((by_hand(world, argv), trained(world, argv)))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("low-bit")
    return base_argv(folder)


@pytest.fixture(scope="module")
def one_process(base: list[str]) -> dict[bool, tuple[Run, Run]]:
    """By whether embedding and head are tied."""
    alone = run_ranks(run_layouts, 1, base, [Layout({}), Layout({}, Model(tied=True))])[0]
    return dict(zip((False, True), alone, strict=True))


@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_layouts_keep_what_one_process_keeps(
    base: list[str], one_process: dict[bool, tuple[Run, Run]], layouts: list[Layout]
) -> None:
    found = run_ranks(run_layouts, layouts[0].ranks, base, layouts)[0]
    for layout, ((given, unequal), (own, unequal_own)) in zip(layouts, found, strict=True):
        (alone, _), (alone_own, _) = one_process[layout.model.tied]
        assert not unequal and not unequal_own, f"{layout.name}: ranks hold unequal numbers"
        codes = [key for key in alone if key.endswith("codes")]
        assert len(codes) == 2 * (4 * 5 + 2 - layout.model.tied)
        wrong = [key for key in given.keys() | alone.keys() if not torch.equal(given[key], alone[key])]
        assert not wrong, f"{layout.name}: {wrong[:3]}"
        off = max(float((own[key] - alone_own[key]).abs().max()) for key in own if key.endswith("weight"))
        moved = sum(int((own[key] != alone_own[key]).sum()) for key in codes) / sum(own[key].numel() for key in codes)
        print(f"{layout.name:24s} weights {off:.1e}, share of codes that differ {moved:.1e}")
        assert off < TOLERANCE["weights"] and moved < TOLERANCE["codes"], layout.name


def test_a_block_is_never_cut(base: list[str]) -> None:
    with pytest.raises(RanksFailed, match=r"block_size: 32 numbers share a scale, and .*=4 would cut .* 64 columns of"):
        run_ranks(by_hand, 4, [*base, *Layout({"tp": 4}).argv(), *SIZES, *OPTIMIZERS])
