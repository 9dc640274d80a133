"""Activation checkpointing: what a block keeps of its forward pass, and what it computes again in the backward pass.

When in the order it is applied stands in ``parallelize.py``. Method: Chen et al. 2016; which operations are kept one by
one is a choice like that of Korthikanti et al. 2022, section 5.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan.config.schema import ActivationCheckpoint
from torchtitan.distributed.compile import compiler_settings
from torchtitan.distributed.gradients import local_part
from torchtitan.models.spec import Layout

_PRODUCTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""Matrix products → which of their inputs is the weight, transposed."""
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""Never computed twice: dear, and what comes out is no larger than what goes in."""


def apply_activation_checkpoint(
    model: nn.Module, layout: Layout, keys: ActivationCheckpoint, blocks: Sequence[str]
) -> None:
    """Let blocks of ``model``, which may be a part of one, compute again what they do not keep, as ``keys`` say.

    ``blocks`` are the names of all blocks of the whole model: every n-th is counted in it. Numbers stay the same to the
    bit.
    """
    if keys.mode == "none":
        return
    if keys.mode == "memory_budget":
        compiler_settings().activation_memory_budget = keys.memory_budget
        return
    options: dict[str, Any] = {
        "preserve_rng_state": keys.preserve_rng_state,
        "determinism_check": keys.determinism_check,
        "early_stop": keys.early_stop,
        "debug": keys.debug,
    }
    nth = 1
    if keys.per_op:
        shapes = frozenset(_weight_shapes(model, layout, keys.per_op_sac_force_recompute_mm_shapes_by_fqns))
        options["context_fn"] = partial(_keeping_some, shapes)
    elif keys.mode == "selective":
        nth = int(keys.selective_ac_option)
    for name, block in model.get_submodule(layout.blocks).named_children():
        if (blocks.index(name) + 1) % nth == 0:
            block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    return run


def _weight_shapes(model: nn.Module, layout: Layout, parts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """As matrix products see them on this rank, of the linear maps in blocks whose names have one of ``parts``."""
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        if module.startswith(f"{layout.blocks}.") and parameter.dim() == 2 and any(part in module for part in parts):
            out_features, in_features = local_part(parameter).shape
            yield in_features, out_features


def _keeping_some(recomputed: frozenset[tuple[int, ...]]) -> Any:
    return create_selective_checkpoint_contexts(_EveryOtherProduct(recomputed))


class _EveryOtherProduct:
    """Keeps what attention gives and every other matrix product of a block, but none by a weight of a shape that is in
    ``recomputed``."""

    def __init__(self, recomputed: frozenset[tuple[int, ...]]) -> None:
        self._recomputed = recomputed
        self._products = {False: 0, True: 0}  # counted apart: torch 2.11 asks again when it recomputes

    def __call__(self, context: Any, operation: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        if operation in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        weight = _PRODUCTS.get(operation)
        if weight is None or tuple(args[weight].shape) in self._recomputed:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._products[context.is_recompute] += 1
        odd = self._products[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
