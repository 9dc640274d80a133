"""Compiling blocks and the loss by torch, and the count of graphs that this made.

When in the order it is done stands in ``parallelize.py``; what a block keeps for its backward pass, in
``activation_checkpoint.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchtitan.log import logger
from torchtitan.loss.losses import Loss
from torchtitan.models.spec import Layout


def compile_blocks(model: nn.Module, layout: Layout, backend: str) -> None:
    """Compile the forward pass of each block of ``model`` in place; alike blocks share their graphs.

    It must be one graph: whatever breaks it raises at the first step. Names of parameters stay.
    """
    for block in model.get_submodule(layout.blocks).children():
        block.forward = _compiled(block.forward, fullgraph=True, backend=backend)


def compile_loss(loss: Loss, backend: str) -> Loss:
    """``loss`` compiled, with breaks where one of somebody's own needs them."""
    compiled: Loss = _compiled(loss, backend=backend)
    return compiled


def _compiled(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Functions with a backward pass of their own, which is part of the cache's key, need not be traced at each start.
    compiler_settings().autograd_cache_allow_custom_autograd_functions = True
    # Sizes stay what they are in a run; a graph for any size would be a slower one.
    return torch.compile(forward, dynamic=False, **options)


def compiler_settings() -> Any:
    """What torch's compiler does beside the arguments it gets, in all that is compiled from then on."""
    from torch._functorch import config  # takes seconds, and nobody else needs it

    return config


class Graphs:
    """Says when torch compiles: how much in the first training step and the first validation, and as a warning
    whenever it does so again after those, which should not happen."""

    def __init__(self) -> None:
        self._warm: set[str] = set()
        self._seen = graphs_made()
        self.again = 0
        """Graphs made after the first step and the first validation."""

    def look(self, at: str, step: int) -> None:
        """Called when ``at``, training or validation, is done with ``step``."""
        made, first = graphs_made() - self._seen, at not in self._warm
        self._seen += made
        self._warm.add(at)
        if made and first:
            logger.info(f"torch.compile made {made} {'graph' if made == 1 else 'graphs'} for {at}")
        elif made:
            self.again += made
            logger.warning(
                f"torch.compile made {made} more {'graph' if made == 1 else 'graphs'} in {at} at step {step}, which "
                "costs seconds each; TORCH_LOGS=recompiles says why"
            )


def graphs_made() -> int:
    """How many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters  # takes seconds, and whoever compiles nothing never needs it

    return int(counters["stats"]["unique_graphs"])
