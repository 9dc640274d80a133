"""How a model is spread over the ranks: decided from the configuration and checked before any process group.

What is then done to the model is in ``parallelize.py``; how many ranks each axis takes, in ``topology.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config.schema import Parallelism
from torchtitan.data.loader import Share
from torchtitan.distributed.stages import PipelinePlan, check_micro_batches, plan_pipeline
from torchtitan.distributed.topology import KEYS, Degrees
from torchtitan.errors import ConfigError, divisors
from torchtitan.log import logger
from torchtitan.models.spec import Divisible, ModelSpec, role_of

Reshard = Literal["default", "always", "never"]
Method = Literal["gather", "ulysses"]
MaskKind = Literal["causal", "documents"]


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
    keys: Parallelism,
    spec: ModelSpec,
    args: Any,
    *,
    world_size: int,
    seq_len: int,
    local_batch_size: int,
    mask: MaskKind = "causal",
) -> Spread:
    """What ``keys`` ask for, for a model and a world of this size; ConfigError if it cannot be had."""
    degrees = Degrees(
        replicate=keys.data_parallel_replicate_degree,
        shard=keys.data_parallel_shard_degree,
        context=keys.context_parallel_degree,
        tensor=keys.tensor_parallel_degree,
        pipeline=keys.pipeline_parallel_degree,
    ).resolve(world_size)
    _note_unused(keys)
    reshard = keys.fsdp_reshard_after_forward
    method, head_tail = keys.context_parallel_method, keys.context_parallel_load_balancer == "headtail"
    pipeline = _plan_pipeline(keys, spec, args, local_batch_size) if degrees.pipeline > 1 else None
    spread = Spread(
        degrees=degrees,
        # A pipeline runs many micro-batches between two uses of a block's weights, and would gather them each time.
        reshard="never" if pipeline and reshard == "default" else reshard,
        spread_logits=not keys.disable_loss_parallel,
        context_method=method,
        head_tail=head_tail,
        mask=mask,
        pipeline=pipeline,
        rows_multiple=keys.pipeline_parallel_microbatch_size if pipeline else 1,
    )
    check_lengths(spread, spec, args, seq_len)
    return spread


def check_lengths(spread: Spread, spec: ModelSpec, args: Any, seq_len: int) -> None:
    """ConfigError where rows of ``seq_len`` tokens or what a model has cannot be spread as ``spread`` says."""
    degrees, divisible = spread.degrees, spec.divisible(args)
    if degrees.tensor > 1:
        check_tensor(degrees, divisible, seq_len, args.vocab_size, spec.max_seq_len(args))
    check_context(
        degrees,
        method=spread.context_method,
        head_tail=spread.head_tail,
        seq_len=seq_len,
        heads=divisible.heads,
        kv_heads=divisible.kv_heads,
    )


_BESIDE = {
    "pipeline_parallel_first_stage_less_layers": "module_fqns_per_model_part",
    "pipeline_parallel_last_stage_less_layers": "module_fqns_per_model_part",
    "pipeline_parallel_schedule": "pipeline_parallel_schedule_csv",
}
"""Keys that say nothing where another is given."""


def _note_unused(keys: Parallelism) -> None:
    """Say which keys change nothing, since their axis has one rank, or another key stands above them."""
    chosen = [name for name, value in keys if value != Parallelism.model_fields[name].default]
    for name in sorted(chosen):
        axis = {"module": "pipeline", "disable": "tensor"}.get(prefix := name.partition("_")[0], prefix)
        degree = f"{axis}_parallel_degree"
        why = None
        if axis in ("pipeline", "context", "tensor") and getattr(keys, degree) == 1:
            why = f"while parallelism.{degree} is 1"
        elif name == "context_parallel_load_balancer" and keys.context_parallel_method == "ulysses":
            why = "beside parallelism.context_parallel_method=ulysses"
        elif _BESIDE.get(name) in chosen:
            why = f"beside parallelism.{_BESIDE[name]}"
        if why is not None:
            logger.warning(f"parallelism.{name} changes nothing {why}")


def micro_batches(spread: Spread, global_batch_size: int, local_batch_size: int) -> int:
    """Number of micro-batches in which a batch passes the pipeline; ConfigError if its schedule needs others."""
    share = Share(global_batch_size, spread.degrees.readers, 0, local_batch_size, spread.rows_multiple)
    number = share.micro_batch_size // spread.rows_multiple
    if spread.pipeline is not None:
        # Of a global batch that fills no local one, the local batch is not to blame.
        few = share.micro_batch_size < local_batch_size
        check_micro_batches(spread.pipeline, number, readers=spread.degrees.readers if few else None)
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


def check_tensor(
    degrees: Degrees, divisible: Divisible, seq_len: int, vocab_size: int, positions: int | None = None
) -> None:
    """ConfigError if the degree of tensor parallelism does not divide what it spreads; of the vocabulary and
    of a table of ``positions`` every rank must have a part."""
    degree, key = degrees.tensor, KEYS["tensor"]
    counts = {"query heads": divisible.heads, "key-value heads": divisible.kv_heads, "ffn features": divisible.hidden}
    fitting = divisors(*counts.values(), degrees.readers * degrees.copies)
    for what, count in counts.items():
        if count % degree:
            raise ConfigError(key, f"{degree} does not divide the model's {count} {what}; try {fitting}")
    for what, rows in (("vocabulary", vocab_size), ("table of positions", positions)):
        if rows is not None and -(-rows // degree) * (degree - 1) >= rows:
            raise ConfigError(key, f"of a {what} of {rows}, not all of {degree} ranks would get a part; lower it")
    if seq_len % (degree * degrees.context):
        parts = f"{degree} ranks" if degrees.context == 1 else f"{degrees.context} context × {degree} tensor ranks"
        near = seq_len // (degree * degrees.context) * degree * degrees.context or degree * degrees.context
        raise ConfigError(
            "training.seq_len", f"{seq_len} tokens cannot be split evenly over {parts}; try {near}, or another degree"
        )


def check_context(
    degrees: Degrees, *, method: Method, head_tail: bool, seq_len: int, heads: int, kv_heads: int
) -> None:
    """ConfigError where rows of ``seq_len`` tokens or the heads of a model cannot be spread over ``degrees.context``
    ranks. The tensor degree divides the heads; it counts because it splits heads and, between blocks, tokens again."""
    context, tensor = degrees.context, degrees.tensor
    if context == 1:
        return
    if method == "ulysses" and math.gcd(heads, kv_heads) % (tensor * context):
        by = f" ({KEYS['tensor']}={tensor})" if tensor > 1 else ""
        each, kv_each = heads // tensor, kv_heads // tensor
        raise ConfigError(
            KEYS["context"],
            f"{context} does not divide the {each} query and {kv_each} key-value heads of a rank{by}, which ulysses "
            f"spreads; try {divisors(math.gcd(each, kv_each))}, or parallelism.context_parallel_method=gather",
        )
    halves = 2 if head_tail and method == "gather" else 1
    unit = context * math.lcm(tensor, halves)
    if seq_len % unit:
        below = seq_len // unit * unit
        factors = [f"{KEYS['context']}={context}"]
        factors += [f"{KEYS['tensor']}={tensor}"] if tensor > 1 else []
        halved = ", a first and a last chunk for each rank" if halves == 2 else ""
        raise ConfigError(
            "training.seq_len",
            f"{seq_len} does not split evenly over {' and '.join(factors)}{halved}; "
            f"try {f'{below} or ' if below else ''}{below + unit}, multiples of {unit}",
        )


def check_blocks(
    degrees: Degrees, spec: ModelSpec, shapes: Mapping[str, Sequence[int]], blocks: Mapping[str, tuple[int, str]]
) -> None:
    """ConfigError where tensor ranks would cut a block of numbers along the last dimension of a parameter, which an
    optimizer keeps together. ``blocks`` are by parameter: the numbers of one, and the key that says so."""
    tensor = degrees.tensor
    for name, (block, key) in blocks.items():
        module, _, own = name.rpartition(".")
        columns = shapes[name][-1]
        # All else is cut along its rows, or not at all.
        if role_of(module, spec.roles) == "row" and own == "weight" and columns % (tensor * block):
            raise ConfigError(
                key,
                f"{block} numbers share a scale, and {KEYS['tensor']}={tensor} would cut such a block of the {columns} "
                f"columns of {name}; lower either",
            )
