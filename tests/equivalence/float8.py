"""Float8 in layouts against one process: what is compared, and the fault that the comparison must see. Float32 but for
the float8 that is emulated, so that what is left is the order of sums."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated
from unittest import mock

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.equivalence.layouts import Layout, Record, run
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.tensor import apply_tensor_parallel
from torchtitan.distributed.world import World
from torchtitan.models.layers import FeedForward
from torchtitan.models.spec import Role
from torchtitan.transforms import CONVERTERS, Converter
from torchtitan.transforms.float8 import Float8
from torchtitan.transforms.quantized import torchao

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@CONVERTERS.register("float8_gathered")
def float8_gathered(
    *, precompute: Annotated[bool, Field(description="find the scales of all weights at once")] = False
) -> Converter:
    """Weights gathered as float8, which a configuration allows on GPUs only."""
    return Float8("tensorwise", [], emulate=True, gather=True, precompute=precompute)


GATHERED = ("--job.imports=tests.equivalence.parts,tests.equivalence.float8", "--model.converters=float8_gathered")
PRECOMPUTED = (*GATHERED, "--float8_gathered.precompute")


def emulated(recipe: str) -> tuple[str, ...]:
    float8 = "quantize.linear.float8"
    return (f"--model.converters={float8}", f"--{float8}.emulate", f"--{float8}.recipe_name={recipe}")


# Blocks of 32 lie within parts of these sizes.
_SIZES = {"dim": 64, "ffn_dim": 64, "n_kv_heads": 8}
MXFP8 = ("--model.converters=quantize.linear.mx", "--quantize.linear.mx.emulate", "--training.seq_len=128")
MXFP8 += tuple(f"--model.args.{name}={size}" for name, size in _SIZES.items())


def run_each(
    world: World, base: Sequence[str], runs: Sequence[tuple[Layout, Sequence[str]]], fault: bool = False
) -> list[Record] | None:
    """Each layout with words of its own in turn, in the same processes."""
    with _unreduced() if fault else nullcontext():
        records = [run(world, [*base, *layout.argv(), *words]) for layout, words in runs]
    return [record for record in records if record is not None] if world.rank == 0 else None


def compiled_gradients(world: World, backend: str) -> list[dict[str, torch.Tensor]]:
    """Of a feed-forward layer over all ranks, what goes through it computed again in the backward pass: plain, then in
    one compiled graph."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = nn.ModuleDict({"ffn": FeedForward(32, 64)})
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    Float8("tensorwise", [], emulate=True)(model)
    roles: dict[str, Role] = {"ffn": "gather", "ffn.w[13]": "column", "ffn.w2": "row"}
    apply_tensor_parallel(model, roles, {}, mesh, spread_logits=False)
    plain = model["ffn"].__call__
    tokens = torch.randn(world.size, 1, 16, 32)[world.rank]
    found = []
    for forward in (plain, torch.compile(plain, fullgraph=True, dynamic=False, backend=backend)):
        model.zero_grad()
        own = tokens.clone().requires_grad_()
        checkpoint(forward, own, use_reentrant=False).square().sum().backward()
        gradients = {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append({**gradients, "tokens": own.grad} if own.grad is not None else gradients)
    return found


@contextmanager
def _unreduced() -> Iterator[None]:
    """Every rank scales by its own part."""
    with torchao():
        from torchtitan.distributed import float8

    with mock.patch.object(float8, "max_alike", lambda value, group: value):
        yield


def first_step(got: Record, expected: Record) -> dict[str, float]:
    """Difference of the loss, and of the gradients relative to their norms: of the middle one, and the largest.

    A number between two of float8 goes to one or the other by its last bit: a rare flip, of up to a quarter in
    tensorwise gradients, after which those of the layers before it are rounded anew. Most are left.
    """

    def relative(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    differences = [relative(got.gradients[name], value) for name, value in expected.gradients.items()]
    return {
        "loss": abs(got.losses[0] - expected.losses[0]),
        "middle": statistics.median(differences),
        "largest": max(differences),
    }
