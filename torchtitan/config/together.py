"""What no two keys may say together: each rule is told by the key to change.

What one key may say alone is in schema.py; what needs the model, the data or the ranks to be told, in resolve/.
"""

from __future__ import annotations

from torchtitan.config.schema import KEYS, ActivationCheckpoint, Checkpoint, Compile, JobConfig
from torchtitan.errors import ConfigError

_TABLES = {
    "data.sources": ("training.dataset_path", "training.dataset"),
    "validation.sets": ("validation.dataset_path", "validation.dataset"),
}
"""Lists of data sets, and the keys of the one data set whose place they take."""


def check_together(config: JobConfig) -> None:
    """ConfigError for the first two keys of ``config`` that contradict each other."""
    total, steps = config.lr_scheduler.total_steps, config.training.steps
    if total is not None and total < steps:
        raise ConfigError(
            "lr_scheduler.total_steps",
            f"the curve ends before training.steps={steps}; make it at least that, or leave it out",
        )
    for which in ("bos", "eos"):
        if getattr(config.data, f"{which}_token") is not None and getattr(config.data, f"{which}_id") is not None:
            raise ConfigError(f"data.{which}_token", f"data.{which}_id is given as well; keep one of them")
        for name in (f"{which}_token", f"{which}_id"):
            if getattr(config.data, name) is not None and not getattr(config.data, f"add_{which}"):
                raise ConfigError(f"data.{name}", f"none is added with data.add_{which} = false; leave this out")
    for tables, keys in _TABLES.items():
        for key in keys if config.value(tables) else ():
            if config.value(key) != KEYS[key].default:
                raise ConfigError(key, f"{tables} names the data sets; leave this out")
    for section in ("training", "validation"):
        loader = getattr(config, section).dataloader
        if loader.prefetch_factor is not None and loader.num_workers == 0:
            raise ConfigError(
                f"{section}.dataloader.prefetch_factor",
                f"there are no workers to prepare batches; set {section}.dataloader.num_workers as well",
            )
    quantizing = [name for name in config.model.converters if name.startswith("quantize.linear.")]
    if len(quantizing) > 1:
        raise ConfigError("model.converters", f"{' and '.join(quantizing)} would change the same maps; keep one")
    _check_recomputed(config.activation_checkpoint, config.compile)
    _check_checkpoint(config.checkpoint)


def _check_recomputed(keys: ActivationCheckpoint, compiled: Compile) -> None:
    blocks = compiled.enable and "model" in compiled.components
    if keys.mode == "memory_budget" and not (blocks and compiled.backend == "inductor"):
        raise ConfigError(
            "activation_checkpoint.mode",
            "a budget is kept by the compiler of blocks alone; set compile.enable = true, with inductor and with model "
            'among compile.components, or take "selective"',
        )
    if blocks:
        for name, off in (("debug", False), ("determinism_check", "default")):
            if getattr(keys, name) != off:
                raise ConfigError(f"activation_checkpoint.{name}", "does nothing in compiled blocks; leave it out")


def _check_checkpoint(keys: Checkpoint) -> None:
    exports = keys.last_save_model_only or keys.last_save_in_hf
    if not keys.enable:
        for name, off in (("initial_load_path", None), ("load_step", -1)):
            if getattr(keys, name) != off:
                raise ConfigError(f"checkpoint.{name}", "nothing is loaded without checkpoint.enable = true")
        for name in ("last_save_model_only", "last_save_in_hf"):
            if getattr(keys, name):
                raise ConfigError(f"checkpoint.{name}", "nothing is saved without checkpoint.enable = true")
    if keys.load_only:
        saving = {"async_mode": "disabled", "enable_first_step_checkpoint": False}
        saving |= {"last_save_model_only": False, "last_save_in_hf": False}
        for name, unused in saving.items():
            if getattr(keys, name) != unused:
                raise ConfigError(f"checkpoint.{name}", "nothing is saved with checkpoint.load_only = true")
    elif keys.export_dtype != "float32" and not exports:
        raise ConfigError(
            "checkpoint.export_dtype",
            "no weights are left alone; set checkpoint.last_save_model_only or last_save_in_hf, or leave it out",
        )
    if keys.initial_load_in_hf:
        if keys.initial_load_path is None:
            raise ConfigError("checkpoint.initial_load_in_hf", "say where in checkpoint.initial_load_path")
        if not keys.initial_load_model_only:
            raise ConfigError(
                "checkpoint.initial_load_model_only", "a Hugging Face model holds weights only; leave it at true"
            )
