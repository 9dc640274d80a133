"""Losses by name: each a sum over the valid tokens, which the step divides by their number once.

Means do not belong here: a mean over part of a batch is what makes layouts disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch import Tensor

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""Logits ``[batch, seq, vocab]`` and labels ``[batch, seq]`` → the sum over labels that are not ignored, float32."""


def on_spread_logits(loss: Loss) -> Loss:
    """Mark a loss that is exact, and gathers nothing, where each tensor-parallel rank holds the logits of a part of the
    vocabulary: it then gets them as a DTensor. Any other loss gets them whole."""
    loss.on_spread_logits = True  # type: ignore[attr-defined]
    return loss


LOSSES: Registry[Callable[..., Loss]] = Registry("loss", home=__name__, receives=())


@LOSSES.register("cross_entropy")
def cross_entropy() -> Loss:
    """Cross entropy in float32 of each token with its label."""
    import torch.nn.functional as F

    from torchtitan.data.batch import IGNORE_INDEX

    @on_spread_logits
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX
        )

    return loss
