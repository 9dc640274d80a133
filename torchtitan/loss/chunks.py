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
    tokens than chunks each is a chunk. Where there are gradients to take they are taken in the forward pass, as soon as
    the logits of a chunk are there, and wait for the backward pass: ``hidden``'s size, and in float32 ``weight``'s.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    chunks = max(1, min(chunks, labels.numel()))
    if torch.is_grad_enabled():
        total: Tensor = _LossOfLinear.apply(hidden, weight, bias, labels, loss, chunks)
        return total
    pieces = zip(hidden.tensor_split(chunks), labels.tensor_split(chunks), strict=True)
    return torch.stack([loss(F.linear(x, weight, bias).unsqueeze(0), y.unsqueeze(0)) for x, y in pieces]).sum()


class _LossOfLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: Loss, chunks: int
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        # Summed over chunks in the chunks' own type, weights in bfloat16 would lose what small chunks add.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        losses, first = [], 0
        for x, y in zip(hidden.tensor_split(chunks), labels.tensor_split(chunks), strict=True):
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
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline that takes the gradients of inputs and of weights apart calls this for each.
        scaled = [
            None if kept is None else (kept * grads[0]).to(dtype)
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None)


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
