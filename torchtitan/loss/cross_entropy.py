"""Summed cross entropy in one pass over the logits, of a whole vocabulary or of a part of one.

Which losses there are, and what options they have, is in ``losses.py``.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.loss.vocabulary import VocabularyPart


def summed_cross_entropy(
    logits: Tensor, labels: Tensor, part: VocabularyPart | None, smoothing: float, z_weight: float
) -> Tensor:
    """The sum over the labels that are not ignored, float32, of

    ``(1 - smoothing) * (z - x[label]) + smoothing * (z - mean(x)) + z_weight * z**2``

    with ``x`` the logits of a token over the whole vocabulary and ``z`` the logarithm of the sum of their exponentials.
    ``logits`` are ``[batch, seq, ids]``, those of ``part`` or, where it is None, of all ids; labels ``[batch, seq]``.
    Over parts a token costs two reductions of one and of two or three numbers (Shoeybi et al. 2019, section 3).
    """
    total: Tensor = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), part, smoothing, z_weight)
    return total


class _CrossEntropy(torch.autograd.Function):
    """What is kept for the backward pass is one float32 tensor of the size of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, part: VocabularyPart | None, smoothing: float, z_weight: float
    ) -> Tensor:
        size, first = (logits.shape[-1], 0) if part is None else (part.size, part.first)
        valid = labels != IGNORE_INDEX
        here = valid & (labels >= first) & (labels < first + logits.shape[-1])
        column = (labels - first).masked_fill(~here, 0).unsqueeze(-1)
        log_share = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # within the part
        log_sum = logits.amax(-1).float() - log_share.amax(-1)
        of_label = logits.gather(-1, column).squeeze(-1).float().masked_fill(~here, 0.0)
        summed = [of_label] if smoothing == 0 else [of_label, logits.sum(-1, dtype=torch.float32)]
        shift = None
        if part is not None:
            highest = part.max(log_sum)
            exponentials, *summed = part.sum(torch.stack([(log_sum - highest).exp(), *summed])).unbind()
            shift, log_sum = log_sum, highest + exponentials.log()
            shift = (shift - log_sum).unsqueeze(-1)
        loss = log_sum - (1 - smoothing) * summed[0] + z_weight * log_sum.square()
        if smoothing:
            loss = loss - smoothing / size * summed[1]
        ctx.save_for_backward(log_share, shift, log_sum, column, here, valid)
        ctx.smoothing, ctx.z_weight, ctx.size, ctx.dtype = smoothing, z_weight, size, logits.dtype
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        log_share, shift, log_sum, column, here, valid = ctx.saved_tensors
        weight = (valid * grads[0]).unsqueeze(-1)
        grad = (log_share if shift is None else log_share + shift).exp()
        grad.mul_(weight * (1 + 2 * ctx.z_weight * log_sum.unsqueeze(-1)))
        if ctx.smoothing:
            grad.sub_(weight * (ctx.smoothing / ctx.size))
        grad.scatter_add_(-1, column, -(1 - ctx.smoothing) * weight * here.unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None, None
