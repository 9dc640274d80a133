"""Older spellings of keys that still work, and keys that mean nothing here but do no harm.

Keys of parts that are not built are in unbuilt.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DROP: Any = object()
"""What ``convert`` returns where the old key said nothing."""


@dataclass(frozen=True)
class Alias:
    """The key to write today. Where its value differs: the old type, and the old value → today's or DROP."""

    key: str
    type: Any = None
    convert: Callable[[Any], Any] | None = None


ALIASES: dict[str, Alias] = {
    "training.batch_size": Alias("training.local_batch_size"),
    "training.compile": Alias("compile.enable"),
    "training.lr": Alias("optimizer.lr"),
    "training.warmup_steps": Alias("lr_scheduler.warmup_steps"),
    "training.data_parallel_replicate_degree": Alias("parallelism.data_parallel_replicate_degree"),
    "training.data_parallel_shard_degree": Alias("parallelism.data_parallel_shard_degree"),
    "training.tensor_parallel_degree": Alias("parallelism.tensor_parallel_degree"),
    "training.seed": Alias("debug.seed"),
    "training.deterministic": Alias("debug.deterministic"),
    "experimental.context_parallel_degree": Alias("parallelism.context_parallel_degree"),
    "experimental.enable_async_tensor_parallel": Alias("parallelism.enable_async_tensor_parallel"),
    "experimental.custom_import": Alias("job.imports", str, lambda name: [name] if name else DROP),
    "experimental.custom_args_module": Alias("job.custom_config_module"),
    "metrics.enable_color_printing": Alias("metrics.disable_color_printing", bool, lambda enable: not enable),
    "model.tokenizer_path": Alias("model.hf_assets_path"),
    "checkpoint.enable_checkpoint": Alias("checkpoint.enable"),
    "checkpoint.model_weights_only": Alias("checkpoint.last_save_model_only"),
    "checkpoint.last_save_model_weights_only": Alias("checkpoint.last_save_model_only"),
    "float8.enable_float8_linear": Alias(
        "model.converters", bool, lambda enable: ["quantize.linear.float8"] if enable else DROP
    ),
}
for _name in (
    "degree",
    "first_stage_less_layers",
    "last_stage_less_layers",
    "layers_per_stage",
    "schedule",
    "schedule_csv",
    "microbatch_size",
):
    ALIASES[f"experimental.pipeline_parallel_{_name}"] = Alias(f"parallelism.pipeline_parallel_{_name}")
for _name in (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "filter_fqns",
    "recipe_name",
    "emulate",
):
    ALIASES[f"float8.{_name}"] = Alias(f"quantize.linear.float8.{_name}")
for _name in ("filter_fqns", "recipe_name", "emulate"):
    ALIASES[f"mx.{_name}"] = Alias(f"quantize.linear.mx.{_name}")

CONVERTER_NAMES: dict[str, str] = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}
"""Older names of converters → today's."""

MEANINGLESS: dict[str, str] = {
    "job.use_for_integration_test": "tests choose their configurations themselves",
    "training.dataloader.persistent_workers": "workers always live for the whole run",
    "validation.dataloader.persistent_workers": "workers always live for the whole run",
    "mx.mxfp8_dim1_cast_kernel_choice": "torchao picks the kernels itself",
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "torchao picks the kernels itself",
    "parallelism.context_parallel_rotate_method": "keys and values are gathered or exchanged by head",
}
"""Key → why it changes nothing here; accepted with a note."""


def older_spellings(key: str) -> list[str]:
    """The names that ``key`` had before."""
    return [old for old, alias in ALIASES.items() if alias.key == key]
