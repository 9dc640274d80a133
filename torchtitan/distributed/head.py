"""The head of a model left to its loss: the forward pass ends before it, so that all logits never exist at once.

How the loss is taken chunk by chunk is in ``loss/chunks.py``.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.collectives import gather_dim
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.tensor import TOKENS
from torchtitan.loss.chunks import loss_of_linear
from torchtitan.loss.losses import Loss
from torchtitan.models.spec import Layout


class HeadLoss:
    """The loss of a model without its head: of the hidden states ``[batch, seq, dim]`` that the model returns and of
    labels ``[batch, seq]``, by the head's parameters as they are then. ``loss`` is that of logits."""

    def __init__(self, head: nn.Linear, loss: Loss, chunks: int) -> None:
        self._head, self._loss, self._chunks = head, loss, chunks
        self._shape = local_part(head.weight).shape
        self._passed_on = 0

    def pass_on(self, hidden: Tensor) -> Tensor:
        """What stands in the model in the head's place."""
        self._passed_on = hidden.data_ptr()
        return hidden

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        if hidden.data_ptr() != self._passed_on:
            raise RuntimeError(
                "the model changes what its head returns, so it cannot do without it; loss.chunks must be 1"
            )
        weight = local_part(self._head.weight)
        bias = None if self._head.bias is None else local_part(self._head.bias)
        if weight.shape != self._shape:
            raise RuntimeError(f"the head's weight is not gathered: {weight.shape} instead of {self._shape}")
        return loss_of_linear(hidden, weight, bias, labels, loss=self._loss, chunks=self._chunks)


def leave_out_head(
    model: nn.Module, layout: Layout, loss: Loss, *, chunks: int, mesh: DeviceMesh | None
) -> HeadLoss | None:
    """Let ``model``, or a part of one, end before its head, and return the loss of what then comes out; None if it has
    no head. Over the tensor ranks of ``mesh`` all tokens come out on each. To be called before FSDP, which must leave
    the head's weights gathered between the forward and the backward pass."""
    head = model.get_submodule(layout.head[-1])
    if not isinstance(head, nn.Linear):
        return None
    of_head = HeadLoss(head, loss, chunks)
    if mesh is None:
        head.forward = of_head.pass_on  # type: ignore[method-assign, assignment]
    else:
        gathered = partial(gather_dim, dim=TOKENS, group=mesh.get_group())
        head.forward = lambda input: of_head.pass_on(gathered(input))  # type: ignore[method-assign]
    return of_head
