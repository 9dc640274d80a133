"""What no two keys may say together: each rule is told by the key to change.

What one key may say alone is in schema.py; what needs the model, the data or the ranks to be told, in resolve/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchtitan.config.schema import KEYS, ActivationCheckpoint, Checkpoint, Compile, JobConfig
from torchtitan.errors import ConfigError

_TABLES = {
    "data.sources": ("training.dataset_path", "training.dataset"),
    "validation.sets": ("validation.dataset_path", "validation.dataset"),
}
"""Lists of data sets, and the keys of the one data set whose place they take."""

_RECOMPUTED = 'activation_checkpoint.mode = "full" or "selective"'
_WAITING: dict[str, tuple[Callable[[JobConfig], bool], str]] = {
    **{
        f"activation_checkpoint.{name}": (lambda c: c.activation_checkpoint.mode in ("full", "selective"), _RECOMPUTED)
        for name in ("early_stop", "preserve_rng_state", "determinism_check", "debug")
    },
    "activation_checkpoint.selective_ac_option": (
        lambda c: c.activation_checkpoint.mode == "selective",
        'activation_checkpoint.mode = "selective"',
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        lambda c: c.activation_checkpoint.per_op,
        'activation_checkpoint.mode = "selective" with selective_ac_option = "op"',
    ),
    "activation_checkpoint.memory_budget": (
        lambda c: c.activation_checkpoint.mode == "memory_budget",
        'activation_checkpoint.mode = "memory_budget"',
    ),
    **{f"compile.{name}": (lambda c: c.compile.enable, "compile.enable = true") for name in ("components", "backend")},
    **{
        f"checkpoint.{name}": (lambda c: c.checkpoint.enable, "checkpoint.enable = true")
        for name in ("last_save_model_only", "last_save_in_hf")
    },
}
"""Key → whether anything asks for its value, and what would."""


def waiting(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Keys of ``config`` that are not at their defaults and change nothing yet, and what they wait for."""
    for key, (asked, switch) in _WAITING.items():
        if config.value(key) != KEYS[key].default and not asked(config):
            yield key, switch


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
    if keys.per_op and keys.debug:
        raise ConfigError(
            "activation_checkpoint.debug",
            'shows nothing where operations are kept one by one; leave it out, or set selective_ac_option = "2"',
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
