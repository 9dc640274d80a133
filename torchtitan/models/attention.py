"""Attention over queries, keys and values: one function a kind of mask, each with the best kernel of the device.

Projections, rotary positions and who holds which part of a sequence do not belong here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What the public call runs on a CPU, asked directly: it would make a float copy of every mask, of as many elements as
# scores, and keep it for the backward pass in each layer; and it tells no logsumexp, which joins parts of a softmax.
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query meets the keys up to its own position.

    Queries ``[batch, queries, heads, head_dim]`` stand at the last of the positions of ``keys`` many keys and values,
    ``[batch, keys, kv_heads, head_dim]``; each of their heads serves a group of query heads.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif q.device.type == "cpu":
        out = _CausalAfterPast.apply(q, k, v)
    else:
        from torch.nn.attention.bias import causal_lower_right  # takes seconds, and a CPU never needs it

        mask = causal_lower_right(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
    return out.transpose(1, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Each query meets the keys that ``allowed``, bool ``[batch, 1, queries, keys]``, names; shapes as in
    ``causal_attention``. A query that meets none gives zeros."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        out = _Masked.apply(q, k, v, allowed)
    else:
        out = F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class _CausalAfterPast(torch.autograd.Function):
    """Queries after a past that all of them see: attention to the past and causal attention among themselves, joined
    by their logsumexps (FlashAttention, section 3.1). No mask exists. ``[batch, heads, seq, head_dim]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = k.shape[2] - q.shape[2]
        before, before_sum = _cpu_flash(q, k[:, :, :past], v[:, :, :past])
        among, among_sum = _cpu_flash(q, k[:, :, past:], v[:, :, past:], is_causal=True)
        log_sum = torch.logaddexp(before_sum, among_sum)
        before_share = (before_sum - log_sum).exp().unsqueeze(-1)
        out = torch.lerp(among.to(log_sum.dtype), before.to(log_sum.dtype), before_share)
        if out.dtype != q.dtype:  # compiled by torch 2.11, a function that ends in a cast of nothing has no gradient
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum = ctx.saved_tensors
        past = k.shape[2] - q.shape[2]
        # With output and logsumexp of the whole, the kernel's gradients are each part's share of the whole.
        grad_q, *before = _cpu_flash_backward(
            grad, q, k[:, :, :past], v[:, :, :past], out, log_sum, dropout_p=0.0, is_causal=False
        )
        more, *among = _cpu_flash_backward(
            grad, q, k[:, :, past:], v[:, :, past:], out, log_sum, dropout_p=0.0, is_causal=True
        )
        grad_k, grad_v = (torch.cat(parts, dim=2) for parts in zip(before, among, strict=True))
        return grad_q + more, grad_k, grad_v


class _Masked(torch.autograd.Function):
    """Attention under a bool mask that all layers share, made a bias anew in each pass and never kept.
    ``[batch, heads, seq, head_dim]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        out, log_sum = _cpu_flash(q, k, v, attn_mask=_bias(allowed, q.dtype))
        ctx.save_for_backward(q, k, v, allowed, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, allowed, out, log_sum = ctx.saved_tensors
        grads = _cpu_flash_backward(
            grad, q, k, v, out, log_sum, dropout_p=0.0, is_causal=False, attn_mask=_bias(allowed, q.dtype)
        )
        return *grads, None


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


class InnerAttention(nn.Module):
    """Scaled dot-product attention without parameters; ``allowed`` is what the model's mask module made of the
    positions, None where every token meets itself and all before it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        return causal_attention(q, k, v) if allowed is None else masked_attention(q, k, v, allowed)


class CausalMask(nn.Module):
    """Positions ``[batch, seq]`` → None: every token meets itself and all before it."""

    def forward(self, positions: Tensor) -> None:
        return None


class DocumentMask(nn.Module):
    """Positions ``[batch, seq]`` that restart in every document → which keys each query meets, those of its own
    document up to itself: bool ``[batch, 1, seq, seq]``, made once for all layers."""

    def forward(self, positions: Tensor) -> Tensor:
        index = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
        starts = document_starts(positions, index)
        return same_document(index, starts, index, starts)


def document_starts(positions: Tensor, index: Tensor) -> Tensor:
    """Where in the row the document of each token begins, int32 ``[batch, seq]``: it tells documents apart.

    ``index`` int32 ``[seq]`` says where in the row the tokens of ``positions`` stand.
    """
    return index - positions.to(torch.int32)


def same_document(q_index: Tensor, q_starts: Tensor, k_index: Tensor, k_starts: Tensor) -> Tensor:
    """Whether a query meets a key, bool ``[batch, 1, queries, keys]``, by where the two stand and their documents
    begin."""
    allowed = (q_starts.unsqueeze(-1) == k_starts.unsqueeze(-2)) & (q_index.unsqueeze(-1) >= k_index.unsqueeze(-2))
    return allowed.unsqueeze(1)
