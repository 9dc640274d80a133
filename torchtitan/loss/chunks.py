"""The loss of what a linear map makes of tokens, chunk by chunk, so that its outputs never exist all at once.

Which losses there are is in ``losses.py``; where the map and its weights come from, in ``distributed/head.py``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.loss.losses import Loss


def loss_of_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, loss: Loss, chunks: int
) -> Tensor:
    """The sum of ``loss`` over as many ``chunks`` of the tokens, of ``hidden @ weight.T + bias`` and ``labels``.

    ``hidden`` is ``[batch, seq, dim]``, ``weight`` ``[ids, dim]``, labels ``[batch, seq]``; a chunk comes to the loss
    as ``[1, tokens, ids]`` and ``[1, tokens]``, and its size differs from that of others by one token at most. Of fewer
    tokens than chunks each is a chunk. Gradients are taken in the forward pass, as soon as the logits of a chunk are
    there, and wait for the backward pass: as much as ``hidden``, and as ``weight`` in float32.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    chunks = max(1, min(chunks, labels.numel()))
    pieces = list(zip(hidden.tensor_split(chunks), labels.tensor_split(chunks), strict=True))
    if not torch.is_grad_enabled():
        return torch.stack([loss(F.linear(x, weight, bias).unsqueeze(0), y.unsqueeze(0)) for x, y in pieces]).sum()

    def room(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros_like(tensor, dtype=dtype) if tensor is not None and tensor.requires_grad else None

    of_hidden = room(hidden, hidden.dtype)
    # In their own type, weights in bfloat16 would lose what small chunks add.
    of_weight, of_bias = room(weight, torch.float32), room(bias, torch.float32)
    losses, first = [], 0
    with torch.no_grad():
        for x, y in pieces:
            value, grad = _value_and_gradient(x, weight, bias, y, loss)
            losses.append(value)
            if of_hidden is not None:
                torch.mm(grad, weight, out=of_hidden[first : first + len(x)])
            if of_weight is not None:
                _add_product(of_weight, grad.T, x)
            if of_bias is not None:
                of_bias.add_(grad.sum(0, dtype=torch.float32))
            first += len(x)
            del grad  # before the logits of the next chunk are made
        total = torch.stack(losses).sum()
    # One after the other: a pipeline that takes the gradients of inputs and of weights apart parts them at these sums.
    for tensor, kept in ((hidden, of_hidden), (weight, of_weight), (bias, of_bias)):
        if kept is not None:
            total = total + _WithGradient.apply(tensor, kept)
    return total


class _WithGradient(torch.autograd.Function):
    """Zero, whose gradient by ``tensor`` is ``gradient``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = tensor.dtype
        return gradient.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None


def _value_and_gradient(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """The loss of one chunk, and its gradient by the logits, ``[tokens, ids]``."""
    logits = F.linear(x, weight, bias).requires_grad_()
    with torch.enable_grad():
        value = loss(logits.unsqueeze(0), labels.unsqueeze(0))
    (grad,) = torch.autograd.grad(value, logits)
    return value.detach(), grad


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, in its type."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
