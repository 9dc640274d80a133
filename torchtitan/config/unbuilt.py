"""Keys that are known but not built yet: only the value that asks for nothing is accepted.

A key leaves this table when schema.py or a registered part takes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.options import CommandLineText, Option
from torchtitan.config.toml import value_text
from torchtitan.errors import ConfigError

ABSENT: Any = object()
"""No value of the key asks for nothing."""


@dataclass(frozen=True)
class Unbuilt:
    """A key that accepts only ``off``, and why."""

    off: Any
    why: str
    switches: tuple[str, ...] = ()
    """Keys of which one must be on for this one to ask for anything."""

    def refuse_unless_off(self, value: Any, *, key: str) -> None:
        """ConfigError, naming ``key``, if ``value`` asks for something."""
        if self.off is not ABSENT:
            if isinstance(value, CommandLineText):
                with contextlib.suppress(ConfigError):  # what cannot be read as the off value's type is not that value
                    value = Option(key, Any | None if self.off is None else type(self.off)).read(value, key=key)
            if value == self.off and isinstance(value, bool) == isinstance(self.off, bool):
                return
        leave = "leave it out" if self.off in (None, ABSENT) else f"leave it at {value_text(self.off)}"
        raise ConfigError(key, f"{self.why}; {leave}")


UNBUILT: dict[str, Unbuilt] = {}


def _add(
    section: str,
    what: str,
    keys: Mapping[str, Any],
    why: str = "is not built yet",
    switches: Sequence[str] = (),
) -> None:
    switches = tuple(f"{section}.{name}" for name in switches)
    for name, off in keys.items():
        key = f"{section}.{name}"
        UNBUILT[key] = Unbuilt(off, f"{what} {why}".strip(), () if key in switches else switches)


_add("job", "", {"save_config_file": None}, "the resolved configuration is always written, to config.toml")
_add("job", "", {"custom_config_module": ""}, "options of your own parts need no class: see job.imports")
_add(
    "profiling",
    "profiling",
    {
        "enable_profiling": False,
        "save_traces_folder": "profile_traces",
        "profile_freq": 10,
        "profiler_active": 1,
        "profiler_warmup": 3,
        "enable_memory_snapshot": False,
        "save_memory_snapshot_folder": "memory_snapshot",
    },
    switches=("enable_profiling", "enable_memory_snapshot"),
)
_add("metrics", "one log a rank", {"save_for_all_ranks": False})
_add("model", "", {"norm_type": "rmsnorm"}, "every family has its own norm")
_add(
    "optimizer",
    "",
    {"early_step_in_backward": False},
    "a step inside the backward pass comes before the norm of all gradients is known, which clipping and the check for "
    "finite gradients need",
)
_add("training", "the report of reference cycles", {"gc_debug": False})
_add(
    "parallelism",
    "",
    {"enable_async_tensor_parallel": False},
    "asynchronous tensor parallelism needs torch.compile and symmetric memory of CUDA, which is not built yet",
)
_add(
    "parallelism",
    "expert parallelism",
    {
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "expert_parallel_comm_backend": "standard",
        "pipeline_parallel_expert_parallel_overlap": True,
    },
)
_add("checkpoint", "loading quantized weights", {"initial_load_in_hf_quantized": False})
_add("checkpoint", "", {"create_seed_checkpoint": False}, "weights are the same in every layout: none is needed")
_add("checkpoint", "", {"interval_type": "steps"}, "intervals are counted in steps")
_add("checkpoint", "fault tolerance by replicas", {"enable_ft_dataloader_checkpoints": True})
_add("activation_checkpoint", "the curve of memory budgets", {"visualize_memory_budget_pareto": False})
_GROUPED = "grouped matrix products are those of experts, which no model here has"
_add("quantize.grouped_mm.float8", "", {"fqns": []}, _GROUPED)
_add("quantize.grouped_mm.mx", "", {"recipe_name": "mxfp8", "fqns": []}, _GROUPED)
_add(
    "comm",
    "the flight recorder",
    {"trace_buf_size": 0, "save_traces_folder": "comm_traces", "save_traces_file_prefix": "rank_"},
)
_add("comm", "a run without its world", {"mode": "default", "fake_rank": ABSENT})
_add("memory_estimation", "estimating memory", {"enable": False, "disable_fake_mode": False}, switches=["enable"])
_add(
    "fault_tolerance",
    "fault tolerance by replicas",
    {
        "enable": False,
        "process_group": "gloo",
        "process_group_timeout_ms": 10000,
        "replica_id": 0,
        "group_size": 0,
        "min_replica_size": 1,
        "semi_sync_method": None,
        "sync_steps": 5,
        "should_quantize": False,
        "fragment_sync_delay": 0,
        "fragment_update_alpha": 0.0,
        "module_fqns_per_model_fragment": [],
        "num_fragments": 1,
    },
    switches=["enable"],
)
_add(
    "guard",
    "the guard of a run",
    {
        "nonfinite": ABSENT,
        "max_skipped": ABSENT,
        "grad_norm_spike": ABSENT,
        "replica_check_freq": ABSENT,
        "straggler_ratio": ABSENT,
    },
)
_add("debug", "mixture of experts", {"moe_force_load_balance": False})

UNBUILT_CHOICES: dict[str, dict[str, str]] = {
    "model.converters": {
        "quantize.grouped_mm.float8": _GROUPED,
        "quantize.grouped_mm.mx": _GROUPED,
    },
}
"""Key → values that are known but not built yet, unless somebody has registered them → why."""


def refuse_unbuilt_choice(key: str, value: Any, *, instead: Sequence[str]) -> None:
    """ConfigError if ``value`` asks ``key`` for what is not built yet, naming what may stand there ``instead``."""
    why = UNBUILT_CHOICES.get(key, {}).get(value) if isinstance(value, str) else None
    if why is not None:
        raise ConfigError(key, f"{why}; known: {', '.join(instead) or 'none'}")
