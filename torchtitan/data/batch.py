"""Batch: what one micro-batch is, from the loader to the model.

How rows are chosen, packed or moved between processes does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The label of a token that counts in no loss: padding, and whatever a dataset masks.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together.

    All three are int64 ``[batch, seq]``: ``labels[b, t]`` is the token after ``tokens[b, t]`` or
    ``IGNORE_INDEX``; ``positions[b, t]`` counts from the start of what token ``t`` may attend to.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    def num_valid(self) -> int:
        """Number of labels that count in the loss. Call it before ``to``: it reads the value back."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``; the copy to an accelerator is put behind what that has to do, and waits for
        nothing."""
        return Batch(*(_sent(tensor, device) for tensor in (self.tokens, self.labels, self.positions)))


def _sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if str(device).startswith("cuda") and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # from any other memory the host would wait for the copy
    return tensor.to(device, non_blocking=True)
