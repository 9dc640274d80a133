"""A logged step, its record, and sinks as a run builds them, for the tests of this room."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan.errors import ConfigError
from torchtitan.observe.device import Memory
from torchtitan.observe.metrics import Metrics, StepStats, ValidationStats
from torchtitan.observe.sinks import SINKS, Record, RunFiles, Sink, ValidationRecord, build_sinks

GPU_MEMORY = Memory(40.0, 50.0, active_gib=32.0, active_percent=40.0, alloc_retries=1, ooms=0)
HOST_MEMORY = Memory(1.5, 6.25)

STATS = StepStats(
    step=20,
    loss=2.5,
    max_loss=2.75,
    grad_norm=1.25,
    lr=3e-4,
    tokens_seen=163_840,
    tokens=81_920,
    steps=10,
    seconds=4.0,
    data_seconds=0.5,
)


def build_metrics(*sinks: Sink, **changes: Any) -> Metrics:
    """Metrics of a job on 4 devices with a peak of 100 TFLOP/s each, whose last step is 100."""
    values: dict[str, Any] = {
        "devices": 4,
        "flops_per_token": 2e9,
        "flops_per_token_causal": 1.5e9,
        "peak_flops": 100e12,
        "last_step": 100,
        "memory": lambda: GPU_MEMORY,
    }
    return Metrics(sinks, **{**values, **changes})


def build_record(step: int = 20, **changes: Any) -> Record:
    """The record of a step that took as long and as many tokens as ``STATS``."""
    return {**build_metrics().write(replace(STATS, step=step)), **changes}


def build_validation_record(**changes: Any) -> ValidationRecord:
    """The record of a set of 40,000 tokens that took two seconds."""
    return {**build_metrics().validated(ValidationStats(20, "wiki", 2.5, 40_000, 2.0)), **changes}


def raises_key(key: str) -> Any:
    """``pytest.raises`` of a ConfigError on ``key``."""
    return pytest.raises(ConfigError, match=f"^{key}: ")


def build_sink(name: str, run: Path, resumed_step: int = 0, **options: Any) -> Sink:
    """The sink of that name for a run in the folder ``run``."""
    builder = SINKS.bind(name, options, key=f"metrics.sink_args.{name}")
    (sink,) = build_sinks({name: builder}, RunFiles(run, resumed_step))
    return sink
