"""How a model is spread over the ranks: decided from the configuration and checked before any process group.

What is then done to the model is in ``parallelize.py``; how many ranks each axis takes, in ``topology.py``.
"""

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.schema import Parallelism
from torchtitan.data.loader import Share
from torchtitan.distributed.context import MaskKind, Method, check_context
from torchtitan.distributed.fsdp import Reshard
from torchtitan.distributed.stages import PipelinePlan, check_micro_batches, plan_pipeline
from torchtitan.distributed.tensor import check_tensor
from torchtitan.distributed.topology import Degrees
from torchtitan.errors import ConfigError, divisors
from torchtitan.models.spec import ModelSpec


@dataclass(frozen=True)
class Spread:
    """Degrees, and what each of their axes does with a model; the defaults are those of a single rank.

    ``rows_multiple`` is what the number of rows of every batch is a multiple of: the rows of a micro-batch of the
    pipeline.
    """

    degrees: Degrees = field(default_factory=lambda: Degrees(shard=1))
    reshard: Reshard = "default"
    spread_logits: bool = True
    context_method: Method = "gather"
    head_tail: bool = True
    mask: MaskKind = "causal"
    pipeline: PipelinePlan | None = None
    rows_multiple: int = 1


def plan_spread(
    keys: Parallelism, spec: ModelSpec, args: Any, *, world_size: int, seq_len: int, local_batch_size: int
) -> Spread:
    """What ``keys`` ask for, for a model and a world of this size; ConfigError if it cannot be had."""
    degrees = Degrees(
        replicate=keys.data_parallel_replicate_degree,
        shard=keys.data_parallel_shard_degree,
        context=keys.context_parallel_degree,
        tensor=keys.tensor_parallel_degree,
        pipeline=keys.pipeline_parallel_degree,
    ).resolve(world_size)
    divisible, reshard = spec.divisible(args), keys.fsdp_reshard_after_forward
    method, head_tail = keys.context_parallel_method, keys.context_parallel_load_balancer == "headtail"
    if degrees.tensor > 1:
        check_tensor(degrees, divisible, seq_len, args.vocab_size)
    if degrees.context > 1:
        check_context(
            degrees,
            method=method,
            head_tail=head_tail,
            seq_len=seq_len,
            heads=divisible.heads,
            kv_heads=divisible.kv_heads,
        )
    pipeline = _plan_pipeline(keys, spec, args, local_batch_size) if degrees.pipeline > 1 else None
    return Spread(
        degrees=degrees,
        # A pipeline runs many micro-batches between two uses of a block's weights, and would gather them each time.
        reshard="never" if pipeline and reshard == "default" else reshard,
        spread_logits=not keys.disable_loss_parallel,
        context_method=method,
        head_tail=head_tail,
        pipeline=pipeline,
        rows_multiple=keys.pipeline_parallel_microbatch_size if pipeline else 1,
    )


def micro_batches(spread: Spread, global_batch_size: int, local_batch_size: int) -> int:
    """Number of micro-batches in which a batch passes the pipeline; ConfigError if its schedule needs others."""
    share = Share(global_batch_size, spread.degrees.readers, 0, local_batch_size, spread.rows_multiple)
    number = share.micro_batch_size // spread.rows_multiple
    if spread.pipeline is not None:
        check_micro_batches(spread.pipeline, number)
    return number


def _plan_pipeline(keys: Parallelism, spec: ModelSpec, args: Any, local_batch_size: int) -> PipelinePlan:
    rows = keys.pipeline_parallel_microbatch_size
    if local_batch_size % rows:
        raise ConfigError(
            "parallelism.pipeline_parallel_microbatch_size",
            f"{rows} rows do not divide training.local_batch_size={local_batch_size}; try {divisors(local_batch_size)}",
        )
    blocks = spec.build_meta(args).get_submodule(spec.layout.blocks)
    plan = plan_pipeline(
        spec.layout,
        [name for name, _ in blocks.named_children()],
        degree=keys.pipeline_parallel_degree,
        schedule=keys.pipeline_parallel_schedule,
        csv=keys.pipeline_parallel_schedule_csv,
        layers_per_stage=keys.pipeline_parallel_layers_per_stage,
        first_stage_less_layers=keys.pipeline_parallel_first_stage_less_layers,
        last_stage_less_layers=keys.pipeline_parallel_last_stage_less_layers,
        module_fqns=keys.module_fqns_per_model_part,
    )
    if keys.fsdp_reshard_after_forward == "always" and plan.splits_backward:
        raise ConfigError(
            "parallelism.fsdp_reshard_after_forward",
            f"weights freed after the forward pass are missing where {plan.schedule} computes their gradients apart; "
            'set it to "default" or "never"',
        )
    return plan
