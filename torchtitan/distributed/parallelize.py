"""From a model family to a runner: the order in which everything is applied, on one screen.

How each step is done is in the file named after it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import ActivationCheckpoint, Compile
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchtitan.distributed.compile import compile_blocks, compile_loss
from torchtitan.distributed.context import ContextSplit, apply_context_parallel, apply_mask
from torchtitan.distributed.convert import convert_model
from torchtitan.distributed.fsdp import Precision, apply_fsdp
from torchtitan.distributed.head import leave_out_head
from torchtitan.distributed.pipeline import PipelineRunner, prune
from torchtitan.distributed.runner import Runner, Seams, WholeRunner, everything
from torchtitan.distributed.spread import Spread
from torchtitan.distributed.tensor import apply_tensor_parallel, spread_loss, tensor_seams
from torchtitan.distributed.topology import Topology
from torchtitan.distributed.whole import boxes
from torchtitan.loss.losses import Loss
from torchtitan.models.init import draw, find_rule
from torchtitan.models.spec import ModelSpec
from torchtitan.transforms import Converter


def parallelize(
    spec: ModelSpec,
    args: Any,
    topology: Topology,
    spread: Spread,
    *,
    loss: Loss,
    converters: Sequence[Converter],
    device: torch.device,
    seed: int,
    precision: Precision,
    cpu_offload: bool,
    activation_checkpoint: ActivationCheckpoint | None = None,
    compiled: Compile | None = None,
    loss_chunks: int = 1,
) -> Runner:
    """Build on meta, cut into stages, convert, split, checkpoint, compile, shard, materialise, initialise."""
    pipeline, tensor, context = topology.pipeline, topology.tensor, topology.context
    split = None if context is None else ContextSplit(context, spread.context_method, spread.head_tail)
    stages = [None] if spread.pipeline is None or pipeline is None else spread.pipeline.stages_of(pipeline.rank)
    tied = spec.tied(args) if pipeline is None else {}
    spread_logits = spread.spread_logits and hasattr(loss, "on_spread_logits")
    if compiled is not None and "loss" in compiled.components:
        loss = compile_loss(loss, compiled.backend)
    seams = Seams(loss, take=everything if split is None else split.take)
    if tensor is not None:
        seams = replace(seams, **tensor_seams(loss, tensor, args.vocab_size, spread_logits=spread_logits))
    parts = []
    for names in stages:
        part = spec.build_meta(args)
        blocks = [block for block, _ in part.get_submodule(spec.layout.blocks).named_children()]
        if names is not None:
            prune(part, spec.layout, names)
        convert_model(part, converters, tied)
        part.to(dtype=precision.storage)
        if tensor is not None:
            apply_tensor_parallel(part, spec.roles, tied, tensor, spread_logits=spread_logits)
        if split is not None:
            apply_context_parallel(part, spec.layout, split, spread.mask)
        else:
            apply_mask(part, spec.layout, spread.mask)
        checkpoint = activation_checkpoint or ActivationCheckpoint()
        # Where a graph would compute again what it got of spread parameters, torch's compiler fails: around it, then.
        around = tensor is not None and not checkpoint.per_op
        if not around:
            apply_activation_checkpoint(part, spec.layout, checkpoint, blocks)
        if compiled is not None and "model" in compiled.components:
            compile_blocks(part, spec.layout, compiled.backend)
        if around:
            apply_activation_checkpoint(part, spec.layout, checkpoint, blocks)
        if loss_chunks > 1:
            of_logits = loss
            if tensor is not None:
                of_logits = spread_loss(loss, tensor, args.vocab_size, spread_logits=spread_logits)
            of_head = leave_out_head(part, spec.layout, of_logits, chunks=loss_chunks, mesh=tensor)
            seams = seams if of_head is None else replace(seams, loss=of_head)
        apply_fsdp(
            part,
            spec.layout,
            topology.fsdp,
            precision=precision,
            reshard=spread.reshard,
            cpu_offload=cpu_offload,
            tied=bool(tied),
            keep_head=loss_chunks > 1,
        )
        part.to_empty(device="cpu" if cpu_offload else device)
        init_weights(part, spec, args, seed)
        parts.append(part)
    if pipeline is None or spread.pipeline is None:
        return WholeRunner(parts[0], seams)
    return PipelineRunner(
        spread.pipeline,
        parts,
        pipeline,
        seams,
        device=device,
        micro_batch_size=spread.rows_multiple,
        tied=spec.tied(args),
    )


@torch.no_grad()
def init_weights(model: nn.Module, spec: ModelSpec, args: Any, seed: int) -> None:
    """Fill this rank's part of every parameter with the family's initial weights, without communication."""
    rules, tied = spec.init(args), spec.tied(args)
    for name, parameter in model.named_parameters():
        name = tied.get(name, name)  # in a later stage, a copy of what the first one holds
        rule = find_rule(rules, name)
        if isinstance(parameter, DTensor):
            for offsets, sizes in boxes(parameter):
                parameter.to_local().copy_(draw(name, parameter.shape, rule, seed, offsets, sizes))
        else:
            parameter.copy_(draw(name, parameter.shape, rule, seed, [0] * parameter.dim(), parameter.shape))
