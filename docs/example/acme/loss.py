"""PolyLoss (Leng et al. 2022, equation 7): cross entropy plus a multiple of the probability that is missed."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.loss.losses import LOSSES, Loss, on_spread_logits
from torchtitan.loss.vocabulary import VocabularyPart


@LOSSES.register("poly")
def poly(*, epsilon: Annotated[float, Field(description="of the missed probability")] = 1.0) -> Loss:
    """Cross entropy plus ``epsilon`` times one minus the probability of the label."""

    @on_spread_logits
    def loss(logits: Tensor, labels: Tensor, part: VocabularyPart | None = None) -> Tensor:
        logits = logits.float()
        valid = labels != IGNORE_INDEX
        if part is None:
            log_sum, label_logit = logits.logsumexp(-1), _pick(logits, labels.masked_fill(~valid, 0))
        else:
            # This rank has the logits of some ids only. Whatever is summed over ids is summed over ranks as well.
            here = (labels >= part.first) & (labels < part.first + logits.shape[-1])
            highest = part.max(logits.amax(-1))
            log_sum = highest + part.sum((logits - highest.unsqueeze(-1)).exp().sum(-1)).log()
            label_logit = part.sum(_pick(logits, (labels - part.first).masked_fill(~here, 0)) * here)
        log_probability = label_logit - log_sum
        return (epsilon * (1 - log_probability.exp()) - log_probability).masked_fill(~valid, 0.0).sum()

    return loss


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
