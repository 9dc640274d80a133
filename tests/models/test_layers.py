"""Rotary positions against their definition, and attention compiled against attention as it is."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.errors import ConfigError
from torchtitan.models.layers import (
    Attention,
    FeedForward,
    Pairs,
    RopeScaling,
    RotaryEmbedding,
    apply_rope,
    rope_frequencies,
)

OFF = RopeScaling(scaling_factor=1.0)
KINDS: tuple[Pairs, ...] = get_args(Pairs)


def members(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    index = torch.arange(8)
    of = index.view(4, 2) if pairs == "interleaved" else index.view(2, 4).T
    return x[..., of[:, 0]], x[..., of[:, 1]]


@pytest.mark.parametrize("pairs", KINDS)
def test_each_pair_turns_by_its_angle(pairs: Pairs) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(2, 5, 3, 8), torch.randint(100, (2, 5))
    rotated = apply_rope(x, *RotaryEmbedding(8, 100.0, OFF, pairs)(positions), pairs)
    angles = positions[..., None, None].double() * rope_frequencies(8, 100.0, None).double()
    turned = torch.complex(*members(x.double(), pairs)) * torch.polar(torch.ones_like(angles), angles)
    for got, expected in zip(members(rotated, pairs), (turned.real, turned.imag), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", KINDS)
def test_compiled_attention_gives_the_same(pairs: Pairs, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attention = Attention(32, 4, 2, 8, pairs=pairs, bias=True, head_norm_eps=1e-6).to(dtype)
    rotation = RotaryEmbedding(8, 100.0, OFF, pairs)(torch.arange(6).expand(2, -1))
    given = torch.randn(2, 6, 32, dtype=dtype)
    results = []
    for attend in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        attention.zero_grad()
        x = given.clone().requires_grad_()
        # Nothing that stands in a larger graph is a leaf.
        attend(2 * x, *rotation, None).square().sum().backward()
        results.append([x.grad, *(p.grad for p in attention.parameters())])
    for eager, compiled in zip(*results, strict=True):
        assert eager is not None and eager.any() and torch.equal(eager, compiled)


@pytest.mark.parametrize("length", [0, -1])
def test_scaling_from_no_length_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="must be above 0") as refused:
        RopeScaling(original_max_position_embeddings=length)
    assert refused.value.key == "model.args.rope_scaling_args.original_max_position_embeddings"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_that_of_plain_operations_and_keeps_only_what_it_is_given(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = FeedForward(16, 32).to(dtype)
    given = torch.randn(2, 6, 16, dtype=dtype, requires_grad=True)
    weights = (block.w1.weight, block.w2.weight, block.w3.weight)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = block(given)
    plain = block.w2(F.silu(block.w1(given)) * block.w3(given))
    assert torch.equal(out, plain)
    grad = torch.randn_like(out)
    for got, expected in zip(
        torch.autograd.grad(out, (given, *weights), grad),
        torch.autograd.grad(plain, (given, *weights), grad),
        strict=True,
    ):
        assert torch.equal(got, expected)
    wide = {x.untyped_storage().data_ptr() for x in kept if x.numel() == 2 * 6 * 32}
    assert len(wide) == 3  # what w1 and w3 gave, and what w2 takes
