"""Attention over queries, keys and values: one function a kind of mask, each with the best kernel of the device.

Projections, rotary positions and who holds which part of a sequence do not belong here.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# What the public call runs on a CPU, asked directly: it would make a float copy of every mask, of as many elements as
# scores, and keep it for the backward pass in each layer; and it tells no logsumexp, which joins parts of a softmax.
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_BLOCK = 128  # queries and keys of a block that FlexAttention computes or leaves out


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


def block_attention(q: Tensor, k: Tensor, v: Tensor, allowed: "BlockMask") -> Tensor:
    """``masked_attention`` by a mask in blocks: what no query meets is neither computed nor stored (FlexAttention,
    Dong et al. 2024)."""
    from torch.nn.attention.flex_attention import flex_attention  # takes seconds, and a CPU never needs it

    # In a compiled block it becomes a part of that; by itself and not compiled, it would hold all scores.
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = attend(q, k, v, block_mask=allowed, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: "Tensor | BlockMask | None") -> Tensor:
        if allowed is None:
            return causal_attention(q, k, v)
        return masked_attention(q, k, v, allowed) if isinstance(allowed, Tensor) else block_attention(q, k, v, allowed)


class CausalMask(nn.Module):
    """Positions ``[batch, seq]`` → None: every token meets itself and all before it."""

    def forward(self, positions: Tensor) -> None:
        return None


class DocumentMask(nn.Module):
    """Positions ``[batch, seq]`` that restart in every document → which keys each query meets, those of its own
    document up to itself: ``document_mask`` of whole rows, made once for all layers."""

    def forward(self, positions: Tensor) -> "Tensor | BlockMask":
        index = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
        return document_mask(index, document_starts(positions, index), positions.shape[1])


def document_starts(positions: Tensor, index: Tensor) -> Tensor:
    """Where in the row the document of each token begins, int32 ``[batch, seq]``: the first key that it meets.

    ``index`` int32 ``[seq]`` says where in the row the tokens of ``positions`` stand.
    """
    return index - positions.to(torch.int32)


def document_mask(index: Tensor, starts: Tensor, keys: int) -> "Tensor | BlockMask":
    """Which of the first ``keys`` tokens of a row its queries meet, in the form that is fastest on their device.

    Query i stands at ``index[i]``, ascending int32 ``[queries]``, and meets all from ``starts[:, i]``, int32
    ``[batch, queries]``, up to itself. On CUDA it is a mask in blocks, of which whole ones are never looked into;
    elsewhere bool ``[batch, 1, queries, keys]``.
    """
    return (block_mask if starts.device.type == "cuda" else dense_mask)(index, starts, keys)


def dense_mask(index: Tensor, starts: Tensor, keys: int) -> Tensor:
    """``document_mask`` as bool ``[batch, 1, queries, keys]``."""
    key = torch.arange(keys, dtype=torch.int32, device=starts.device)
    return ((key >= starts.unsqueeze(-1)) & (key <= index.unsqueeze(-1))).unsqueeze(1)


def block_mask(index: Tensor, starts: Tensor, keys: int) -> "BlockMask":
    """``document_mask`` in blocks, without one element of the dense one: the keys of a query are an interval, so those
    of a block of queries are."""
    from torch.nn.attention.flex_attention import BlockMask

    def meets(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= starts[batch, query]) & (key <= index[query])

    queries, device = len(index), starts.device
    first = torch.arange(0, queries, _BLOCK, device=device)
    last = (first + _BLOCK - 1).clamp(max=queries - 1)
    key = torch.arange(0, keys, _BLOCK, dtype=torch.int32, device=device)  # the first of each block
    before, after = key + _BLOCK <= index[first].unsqueeze(-1) + 1, key <= index[last].unsqueeze(-1)
    some = (key + _BLOCK > starts[:, first].unsqueeze(-1)) & after
    # A block that is not full is not whole either: what stands beyond its end must be masked.
    whole = (key >= starts[:, last].unsqueeze(-1)) & before & (first + _BLOCK <= queries).unsqueeze(-1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=meets, seq_lengths=(queries, keys)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """``[batch, query blocks, key blocks]`` → how many key blocks are true, ``[batch, 1, query blocks]``, and which, at
    the front of ``[batch, 1, query blocks, key blocks]``; both int32."""
    number, order = blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True)
    return number.unsqueeze(1), order.int().unsqueeze(1)
