"""Gathering and scattering of a dimension over ranks, with gradients; on gloo and NCCL alike.

Which dimension is spread, and what is computed in between, is in ``tensor.py`` and ``context.py``.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 calls them "single", and warns of the names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """``part`` of every rank of ``group``: ``[ranks, *part.shape]``. No gradient."""
    part = part.contiguous()
    out = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    _all_gather(out, part, group=group)
    return out.view(group.size(), *part.shape)


def reduce_scatter(parts: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks of what each has for this one: ``[ranks, ...]`` → ``[...]``. No gradient."""
    parts = parts.contiguous()
    if parts.device.type == "cpu":
        # gloo would reduce everything everywhere; to exchange and then sum sends a fraction of that.
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received.sum(0)
    out = parts.new_empty(parts.shape[1:])
    _reduce_scatter(out, parts.flatten(0, 1), group=group)
    return out.clone()  # see joined


def gather_dim(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks one after the other along ``dim``; in the backward pass each rank gets the sum of the
    gradients of its part."""
    gathered: Tensor = _Gather.apply(part, dim, group)
    return gathered


def scatter_dim(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The sum of ``whole`` over all ranks, of which each gets its part along ``dim``; in the backward pass the
    gradients of all parts come together again."""
    part: Tensor = _Scatter.apply(whole, dim, group)
    return part


def sum_alike(value: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``value`` over all ranks, which all go on with alike: the gradient of what a rank adds is the one that
    the sum has there."""
    total: Tensor = _SumAlike.apply(value, group)
    return total


def max_alike(value: Tensor, group: ProcessGroup) -> Tensor:
    """The largest ``value`` of any rank, elementwise. No gradient."""
    value = value.detach().clone()
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


class _SumAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup) -> Tensor:
        value = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value, group=group)
        return value.clone()  # see joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return joined(all_gather(part, group), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(split(grads[0], ctx.dim, ctx.group.size()), ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(split(whole, dim, group.size()), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return joined(all_gather(grads[0], ctx.group), ctx.dim), None, None


def joined(parts: Tensor, dim: int) -> Tensor:
    """``[ranks, ...]`` → the parts after one another along ``dim`` of one of them."""
    # Compiled by torch 2.11, a function that returns what was written in place has no gradient: this must be a copy.
    return torch.cat(parts.unbind(), dim=dim)


def split(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The inverse of ``joined``."""
    return whole.unflatten(dim, (ranks, -1)).movedim(dim, 0)
