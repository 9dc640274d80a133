"""Building blocks that decoder families share: rotary positions, projections of attention, gated feed-forward.

Whole models and their sizes do not belong here. Every module works on however many heads or features its weights
hold: shapes are asked of the tensors, never computed from a configuration.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.errors import ConfigError
from torchtitan.models.attention import InnerAttention


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of slow rotary frequencies to longer contexts than trained on (Llama 3.1)."""

    scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not 0 < self.scaling_factor < math.inf:
            raise ConfigError("model.args.rope_scaling_args.scaling_factor", "must be above 0")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "model.args.rope_scaling_args.high_freq_factor",
                f"must be above low_freq_factor={self.low_freq_factor}, which must be positive",
            )
        if self.original_max_position_embeddings <= 0:
            raise ConfigError("model.args.rope_scaling_args.original_max_position_embeddings", "must be above 0")


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Angle per position of each pair of head dimensions, float32 ``[head_dim / 2]`` (RoFormer, section 3.2).

    Under ``scaling`` wavelengths beyond ``original / low_freq_factor`` are divided by the factor, those below
    ``original / high_freq_factor`` stay, and in between the two are blended (Llama 3.1).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponent
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling.scaling_factor * (1.0 - keep)


Pairs = Literal["interleaved", "halves"]
"""Which two dimensions of a head turn together: (2i, 2i + 1), or (i, i + head_dim / 2)."""


class RotaryEmbedding(nn.Module):
    """Positions ``[batch, seq]`` → what ``apply_rope`` multiplies with, both float32 ``[batch, seq, 1, head_dim]``:
    the cosine of each dimension's angle, and its sine, negative at the first of a pair.

    It holds no buffer, so nothing can be cast or lost between building and training.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling, pairs: Pairs) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self.pairs = pairs

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = rope_frequencies(self.head_dim, self.theta, self.scaling, positions.device)
        angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        if self.pairs == "halves":
            return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """Rotate the ``pairs`` of ``x`` ``[batch, seq, heads, head_dim]``; computed in float32."""
    rotated: Tensor = _Rotation.apply(x, cos, sin, pairs)
    return rotated


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back; nothing of ``x`` is kept for it, and no pair is taken apart twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _rotate(x, cos, sin, pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.pairs), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    wide = x.float()
    other = torch.empty_like(wide)  # of each pair
    first, second = _members(wide, pairs)
    into_first, into_second = _members(other, pairs)
    into_first.copy_(second)
    into_second.copy_(first)
    rotated = torch.addcmul(wide * cos, other, sin)
    # Compiled by torch 2.11, a function that ends in a cast of nothing has no gradient.
    return rotated if rotated.dtype == x.dtype else rotated.type_as(x)


def _members(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The first and the second dimension of every pair, as views."""
    if pairs == "halves":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions: ``[batch, seq, dim]`` → the same; ``allowed`` is what the
    model's mask module returned.

    ``bias`` adds one to queries, keys and values; with ``head_norm_eps`` each head of queries and keys passes a norm
    before it is rotated (Henry et al. 2020, with RMS norms).
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        pairs: Pairs,
        bias: bool = False,
        head_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.pairs = pairs
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.Identity() if head_norm_eps is None else nn.RMSNorm(head_dim, eps=head_norm_eps) for _ in "qk"
        )
        self.inner_attention = InnerAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q = apply_rope(self.q_norm(q), cos, sin, self.pairs)
        k = apply_rope(self.k_norm(k), cos, sin, self.pairs)
        out = self.inner_attention(q, k, v, allowed)
        return self.wo(out.reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU feed-forward: ``w2(silu(w1 x) * w3 x)`` (Shazeer 2020)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(_Gate.apply(self.w1(x), self.w3(x)))


class _Gate(torch.autograd.Function):
    """``silu(gate) * x``, which keeps only what it is given: the gate is opened again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return F.silu(gate) * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, x = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * x, gate), grad * F.silu(gate)
