"""From a configuration to a job: every name bound to its part, every number checked, before any process group.

Nothing is built here that computes or writes; the trainer builds from what stands in the job. What the model alone is
asked is in model.py, what lies in the checkpoint's folders in checkpoints.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.config import JobConfig
from torchtitan.config.schema import Data, Validation
from torchtitan.config.tables import SETS
from torchtitan.config.together import check_together
from torchtitan.data.blend import Blend, Source, bind_source, bind_table, plan_blend, plan_one
from torchtitan.data.datasets import OnBadRecord
from torchtitan.data.rows.foreign import check_order, check_unordered
from torchtitan.data.tokenizer import TOKENIZERS, Tokenizer, special_ids
from torchtitan.data.tokens.encode import Encoding
from torchtitan.distributed.passes import check_activation_checkpoint, check_compile, check_compiler
from torchtitan.distributed.spread import Spread, check_blocks, check_lengths, micro_batches, plan_spread
from torchtitan.errors import ConfigError, keys_told_as
from torchtitan.log import logger
from torchtitan.loss.losses import LOSSES, Loss
from torchtitan.models.spec import MODELS, ModelSpec, roles_of
from torchtitan.observe.sinks import SINKS, check_packages
from torchtitan.optim.groups import OptimizerPlan, check_plan, plan_optimizer
from torchtitan.optim.schedules import SCHEDULES, Schedule
from torchtitan.resilience.folder import check_folder
from torchtitan.resolve.checkpoints import check_checkpoints
from torchtitan.resolve.model import bind_converter, check_model, check_positions, resolve_args
from torchtitan.transforms import Converter
from torchtitan.transforms.quantized import Quantized


@dataclass(frozen=True)
class ValidationPlan:
    """What a round looks at, and in rows and batches of which size."""

    sets: Mapping[str | None, Source]
    """By name; None for the only one, which has none."""
    seq_len: int
    local_batch_size: int


@dataclass(frozen=True)
class Job:
    """A configuration whose every word has been understood, for a world of a given size."""

    config: JobConfig
    spread: Spread
    spec: ModelSpec
    args: Any
    blend: Blend
    tokenizer: Tokenizer | None
    encoding: Encoding | None
    """How text becomes ids; None where all data are ids already, and then a tokenizer may be missing too."""
    validation: ValidationPlan | None
    loss: Loss
    converters: list[Converter]
    optimizer: OptimizerPlan
    schedule: Schedule
    sinks: Mapping[str, partial[Any]]


def resolve_job(config: JobConfig, world_size: int) -> Job:
    """Bind and check everything in ``config``; ConfigError for the first thing that cannot be.

    Reads files only to see that they are there and what they are.
    """
    check_together(config)  # once more, for it may have been put together in code
    training, model, data = config.training, config.model, config.data
    check_folder(Path(config.job.dump_folder))
    spec = MODELS.get(model.name, key="model.name")
    args = resolve_args(spec, model.flavor, model.args)
    if config.checkpoint.enable:
        check_checkpoints(config, spec, args)
    converters = [bind_converter(name, config) for name in model.converters]
    converted = check_model(spec, args, converters, loss_chunks=config.loss.chunks)
    shapes: dict[str, Sequence[int]] = {name: parameter.shape for name, parameter in converted.named_parameters()}
    check_positions(spec, args, training.seq_len)
    spread = plan_spread(
        config.parallelism,
        spec,
        args,
        world_size=world_size,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        mask="causal" if data.packing == "concat" else "documents",
    )
    check_compile(config.compile, spread, on_cpu=not torch.cuda.is_available())
    check_activation_checkpoint(config.activation_checkpoint, spread, spec.layout, shapes)
    rows = training.global_batch_size
    number = micro_batches(
        spread, training.local_batch_size * spread.degrees.readers if rows == -1 else rows, training.local_batch_size
    )
    tokens = _tokens_at_once(spread, training.seq_len, number)
    if config.loss.chunks > tokens:
        raise ConfigError(
            "loss.chunks", f"the loss is taken of {tokens} tokens of a rank at once; lower it, usually to 8 or 16"
        )
    modules = [(name, role, converted.get_submodule(name)) for name, role in roles_of(converted, spec.roles)]
    for converter in converters:
        if isinstance(converter, Quantized):
            converter.check_parts(modules, tensor=spread.degrees.tensor, tokens=tokens)
    blend = (
        plan_blend(data.sources, data.on_bad_record)
        if data.sources
        else plan_one(training.dataset, training.dataset_path, data.args, data.on_bad_record)
    )
    check_order(blend, order=data.order, packing=data.packing, global_batch_size=rows)
    validation = _plan_validation(config, spec, args, spread) if config.validation.enable else None
    tokenizer, encoding = None, None
    held_out = validation.sets.values() if validation is not None else ()
    reads_text = any(source.is_text for source in (*blend.sources.values(), *held_out))
    if reads_text or model.hf_assets_path:
        tokenizer = bound(TOKENIZERS, config.tokenizer, "tokenizer")(model.hf_assets_path)
        encoding = _encoding(data, tokenizer, args.vocab_size) if reads_text else None

    optimizer = plan_optimizer(
        config.optimizer.name,
        config.optimizer.model_extra or {},
        lr=config.optimizer.lr,
        weight_decay_exclude=config.optimizer.weight_decay_exclude,
        groups=config.optimizer.groups,
    )
    check_plan(optimizer, shapes, spec.tied(args))
    for group in optimizer.groups:
        if group.compiled and (config.training.enable_cpu_offload or not torch.cuda.is_available()):
            check_compiler(f"{group.key}.implementation", 'or set it to "for-loop"')
    check_blocks(spread.degrees, spec, shapes, optimizer.blocks(shapes))
    return Job(
        config=config,
        spread=spread,
        spec=spec,
        args=args,
        blend=blend,
        validation=validation,
        tokenizer=tokenizer,
        encoding=encoding,
        loss=bound(LOSSES, config.loss, "loss")(),
        converters=converters,
        optimizer=optimizer,
        schedule=bound(SCHEDULES, config.lr_scheduler, "lr_scheduler")(
            config.lr_scheduler.total_steps or training.steps
        ),
        sinks=_sinks(config),
    )


def _tokens_at_once(spread: Spread, seq_len: int, number: int) -> int:
    """Of a rank's batch, in which ``number`` is that of rows, or where there is a pipeline, of its micro-batch."""
    rows = number if spread.pipeline is None else spread.rows_multiple
    return rows * seq_len // spread.degrees.context


def _plan_validation(config: JobConfig, spec: ModelSpec, args: Any, spread: Spread) -> ValidationPlan:
    """What ``[validation]`` asks for; ConfigError, on its keys, for what this model cannot look at when so spread."""
    keys, training = config.validation, config.training
    seq_len, rows = keys.seq_len or training.seq_len, keys.local_batch_size or training.local_batch_size
    if keys.seq_len is not None:
        with keys_told_as({"training.seq_len": "validation.seq_len"}):
            check_positions(spec, args, seq_len)
            check_lengths(spread, spec, args, seq_len)
    if rows % spread.rows_multiple:
        raise ConfigError(
            "validation.local_batch_size",
            f"is no multiple of parallelism.pipeline_parallel_microbatch_size={spread.rows_multiple}; "
            f"try {rows // spread.rows_multiple * spread.rows_multiple or spread.rows_multiple}",
        )
    if keys.global_batch_size is not None and keys.steps == -1:
        logger.warning("validation.global_batch_size changes nothing while validation.steps is -1")
    sets = _validation_sets(keys, config.data.on_bad_record)
    check_unordered(sets.values())
    return ValidationPlan(sets, seq_len, rows)


def _validation_sets(keys: Validation, on_bad_record: OnBadRecord) -> dict[str | None, Source]:
    if not keys.sets:
        only = bind_source(
            keys.dataset,
            keys.dataset_path,
            keys.args,
            on_bad_record,
            section="validation",
            options_in="validation.args",
            name="validation",
        )
        return {None: only}
    sets: dict[str | None, Source] = {}
    for number, table in enumerate(keys.sets):
        key = f"{SETS.key}[{number}]"
        if table["name"] in sets:
            raise ConfigError(f"{key}.name", f"{table['name']!r} is a set already; give each a name of its own")
        sets[table["name"]] = bind_table(table, SETS, key, on_bad_record, name=table["name"])
    return sets


def _sinks(config: JobConfig) -> dict[str, partial[Any]]:
    metrics = config.metrics
    options: dict[str, dict[str, Any]] = {"console": {"color": not metrics.disable_color_printing}, "jsonl": {}}
    if metrics.enable_tensorboard:
        options["tensorboard"] = {"folder": metrics.save_tb_folder}
    if metrics.enable_wandb:
        options["wandb"] = {}
    options |= {name: metrics.sink_args.get(name, {}) for name in metrics.sinks}
    for name in options:
        SINKS.get(name, key="metrics.sinks")
    check_packages(options)
    return {name: SINKS.bind(name, own, key=f"metrics.sink_args.{name}") for name, own in options.items()}


def _encoding(data: Data, tokenizer: Tokenizer, vocab_size: int) -> Encoding:
    """How text becomes ids, all of them below ``vocab_size``."""
    bos_id, eos_id = special_ids(tokenizer, data)
    _check_vocabulary(vocab_size, tokenizer, bos_id, eos_id)
    return Encoding(tokenizer, bos_id, eos_id)


def _check_vocabulary(vocab_size: int, tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "model.args.vocab_size",
            f"the tokenizer ({tokenizer.name}) has ids up to {tokenizer.vocab_size - 1}, the model {vocab_size} rows; "
            f"set model.args.vocab_size to at least {tokenizer.vocab_size} or choose another model.hf_assets_path",
        )
    for name, token in (("data.bos_id", bos_id), ("data.eos_id", eos_id)):
        if token is not None and token >= vocab_size:
            raise ConfigError(name, f"{token} is outside the model's vocabulary of {vocab_size}")


def bound(registry: Any, section: Any, key: str) -> Any:
    """The section's named builder with the section's own options."""
    return registry.bind(section.name, section.model_extra or {}, key=key)
