"""Losses by name: each a sum over the valid tokens, which the step divides by their number once.

Means do not belong here: a mean over part of a batch is what makes layouts disagree. How ranks reach each other does
not belong here either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from torchtitan.loss.vocabulary import VocabularyPart
from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch import Tensor


Loss = Callable[..., "Tensor"]
"""Logits ``[batch, seq, vocab]`` and labels ``[batch, seq]`` → the sum over labels that are not ignored, float32."""


def on_spread_logits(loss: Loss) -> Loss:
    """Mark a loss that is exact, and gathers nothing, where each tensor-parallel rank holds the logits of a part of the
    vocabulary: there it gets a ``VocabularyPart`` as its argument ``part``. Any other loss gets the logits whole."""
    loss.on_spread_logits = True  # type: ignore[attr-defined]
    return loss


LOSSES: Registry[Callable[..., Loss]] = Registry("loss", home=__name__, receives=())

Smoothing = Annotated[float, Field(ge=0, lt=1, description="share of each label that all ids get alike")]


@LOSSES.register("cross_entropy")
def cross_entropy() -> Loss:
    """Cross entropy in float32 of each token with its label."""
    return _cross_entropy(smoothing=0.0, z_weight=0.0)


@LOSSES.register("label_smoothing")
def label_smoothing(*, smoothing: Smoothing = 0.1) -> Loss:
    """Cross entropy with labels that are spread a little over the whole vocabulary (Szegedy et al. 2016, section 7)."""
    return _cross_entropy(smoothing=smoothing, z_weight=0.0)


@LOSSES.register("z_loss")
def z_loss(
    *,
    z_weight: Annotated[float, Field(ge=0, description="of the squared logarithm of the softmax's denominator")] = 1e-4,
    smoothing: Smoothing = 0.0,
) -> Loss:
    """Cross entropy and a pull of the softmax's denominator to 1, so that logits do not drift (PaLM, section 5)."""
    return _cross_entropy(smoothing=smoothing, z_weight=z_weight)


def _cross_entropy(*, smoothing: float, z_weight: float) -> Loss:
    from torchtitan.loss.cross_entropy import summed_cross_entropy

    @on_spread_logits
    def loss(logits: Tensor, labels: Tensor, part: VocabularyPart | None = None) -> Tensor:
        return summed_cross_entropy(logits, labels, part, smoothing, z_weight)

    return loss
