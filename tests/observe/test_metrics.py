"""Rates, utilisation and time left, by hand; and what a failing sink may cost."""

import errno
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.observe.records import GPU_MEMORY, HOST_MEMORY, STATS, build_metrics
from torchtitan.observe.device import memory, peak_flops
from torchtitan.observe.metrics import Metrics, StepStats, ValidationStats
from torchtitan.observe.sinks import Record


class Kept:
    """Keeps its records, or raises ``error`` instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.records: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        if self.error is not None:
            raise self.error
        self.records.append(record)

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def test_rates_by_hand() -> None:
    # 81,920 tokens in 4 s on 4 devices: 5,120 tokens a second and device, at 2 GFLOP each.
    record = build_metrics().write(STATS)
    expected = {
        "step": 20,
        "loss": 2.5,
        "max_loss": 2.75,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens_seen": 163_840,
        "tps": 5120.0,
        "tflops": 10.24,
        "mfu": 10.24,
        "mfu_causal": 7.68,
        "memory_gib": 40.0,
        "memory_percent": 50.0,
        "memory_active_gib": 32.0,
        "memory_active_percent": 40.0,
        "alloc_retries": 1,
        "ooms": 0,
        "data_loading_seconds": 0.05,
        "data_loading_percent": 12.5,
        "step_seconds": 0.4,
        "seconds_left": 32.0,
    }
    assert abs(record["wall_time"] - time.time()) < 60
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert record.keys() == expected.keys() | {"wall_time"}


def test_what_does_not_apply_is_none() -> None:
    record = build_metrics(peak_flops=None, memory=lambda: HOST_MEMORY).write(replace(STATS, max_loss=None))
    assert {name for name, value in record.items() if value is None} == {
        *("max_loss", "mfu", "mfu_causal"),
        *("memory_active_gib", "memory_active_percent", "alloc_retries", "ooms"),
    }


def window(step: int, steps: int, seconds: float) -> StepStats:
    return replace(STATS, step=step, steps=steps, seconds=seconds)


@pytest.mark.parametrize("start", [0, 40], ids=["new", "resumed"])
def test_time_left_is_the_pace_of_this_process(start: int) -> None:
    # The slow first step is all that is known at the first line, and forgotten at the second.
    metrics = build_metrics(last_step=start + 30)
    lines = [window(start + 1, 1, 60.0), window(start + 10, 9, 18.0), window(start + 20, 10, 40.0)]
    left = [metrics.write(stats)["seconds_left"] for stats in lines]
    assert left == pytest.approx([60.0 * 29, 2.0 * 20, 58.0 / 19 * 10])
    assert metrics.write(window(start + 30, 10, 20.0))["seconds_left"] == 0.0


def test_every_sink_gets_the_record_that_is_returned() -> None:
    sinks = [Kept(), Kept()]
    metrics = build_metrics(*sinks)
    record = metrics.write(STATS)
    metrics.close()
    assert [sink.records for sink in sinks] == [[record], [record]]
    assert all(sink.closed for sink in sinks)


class Validated(Kept):
    """Keeps what validation found as well."""

    def validated(self, record: Record) -> None:
        self.write(record)


def test_what_validation_found_by_hand() -> None:
    # 40,000 tokens in 2 s on 4 devices.
    record = build_metrics().validated(ValidationStats(20, "wiki", 2.5, 40_000, 2.0))
    expected = {
        "step": 20,
        "set": "wiki",
        "loss": 2.5,
        "tokens": 40_000,
        "seconds": 2.0,
        "tps": 5000.0,
        "memory_gib": 40.0,
        "memory_percent": 50.0,
        "memory_active_gib": 32.0,
        "memory_active_percent": 40.0,
    }
    assert abs(record.pop("wall_time") - time.time()) < 60
    assert record == expected


def test_sinks_that_know_nothing_of_validation_go_on(log: pytest.LogCaptureFixture) -> None:
    old, new, full = Kept(), Validated(), Validated(NO_SPACE)
    record = build_metrics(old, full, new).validated(ValidationStats(20, None, 2.5, 40_000, 2.0))
    assert old.records == [] and new.records == [record]
    (message,) = log.messages
    assert "No space left on device" in message
    with pytest.raises(KeyError, match="gone"):
        build_metrics(Validated(KeyError("gone"))).validated(ValidationStats(20, None, 2.5, 40_000, 2.0))


def test_validation_changes_neither_rates_nor_the_time_left() -> None:
    metrics, other = build_metrics(), build_metrics()
    for step in (10, 20):
        stats = window(step, 10, 18.0)
        other.validated(ValidationStats(step, None, 2.5, 40_000, 1000.0))
        first, second = metrics.write(stats), other.write(stats)
        assert first.pop("wall_time") != second.pop("wall_time") and first == second


def test_a_full_disk_costs_one_warning_not_the_run(log: pytest.LogCaptureFixture) -> None:
    full, well = Kept(NO_SPACE), Kept()
    metrics = build_metrics(full, well)
    for step in (20, 30, 40):
        metrics.write(replace(STATS, step=step))
    metrics.close()
    assert [record["step"] for record in well.records] == [20, 30, 40]
    assert well.closed
    (message,) = log.messages
    assert "Kept" in message
    assert "No space left on device" in message


def test_a_sink_goes_on_when_there_is_room_again() -> None:
    sink = Kept(NO_SPACE)
    metrics = build_metrics(sink)
    metrics.write(STATS)
    sink.error = None
    metrics.write(replace(STATS, step=30))
    assert [record["step"] for record in sink.records] == [30]


def test_a_mistake_in_a_sink_is_raised() -> None:
    with pytest.raises(KeyError, match="gone"):
        build_metrics(Kept(KeyError("gone"))).write(STATS)


def test_all_sinks_are_closed_before_a_mistake_is_raised() -> None:
    wrong, well = Kept(KeyError("gone")), Kept()
    with pytest.raises(KeyError, match="gone"):
        build_metrics(wrong, well).close()
    assert well.closed


def test_a_step_that_beats_the_peak_has_no_utilisation(log: pytest.LogCaptureFixture) -> None:
    # 2 GFLOP, or 1.5 with causal attention, for each of 5,120 tokens a second.
    metrics = build_metrics(peak_flops=8e12)
    records = [metrics.write(replace(STATS, step=step)) for step in (20, 30)]
    assert [record["mfu"] for record in records] == [None, None]
    assert [record["mfu_causal"] for record in records] == pytest.approx([96.0, 96.0])
    (message,) = log.messages
    assert "metrics.peak_tflops" in message


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_utilisation_of_a_real_loop_is_between_0_and_100_percent(dtype: torch.dtype) -> None:
    device, rows, size = torch.device("cpu"), 256, 256
    model = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    operations = 6 * sum(parameter.numel() for parameter in model.parameters())
    peak, source = peak_flops(device, dtype)
    metrics = Metrics(
        [],
        devices=1,
        flops_per_token=operations,
        flops_per_token_causal=operations,
        peak_flops=peak,
        last_step=4,
        memory=lambda: memory(device),
    )
    inputs = torch.randn(rows, size, dtype=dtype)
    for step in range(1, 5):
        start = time.perf_counter()
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        record = metrics.write(replace(STATS, step=step, tokens=rows, steps=1, seconds=seconds, data_seconds=0.0))
        assert record["mfu"] is not None, source
        assert 0 < record["mfu"] < 100, source
        assert record["memory_gib"] is not None
        assert 0 < record["memory_gib"] < 64


def test_the_memory_is_read_once_a_record() -> None:
    # On CUDA each reading begins new peaks.
    readings = []

    def read() -> object:
        readings.append(None)
        return GPU_MEMORY

    metrics = build_metrics(Kept(), Kept(), memory=read)
    metrics.write(STATS)
    assert len(readings) == 1
