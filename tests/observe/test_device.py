"""Peak FLOP/s: known devices by their names, all others measured; peak memory of CUDA and of a process."""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from torchtitan.observe.device import known_peak, memory, peak_flops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI250X/MI250", 191.5),
        ("AMD Instinct MI300X", 1300),
        ("AMD Instinct MI325X", 1300),
        ("AMD Instinct MI355X", 2500),
        ("NVIDIA A10", None),
        ("NVIDIA A100X", None),
        ("NVIDIA A800-SXM4-80GB", None),
        ("NVIDIA H800", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("GRID A100-10C", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("AMD Instinct MI300A", None),
        ("", None),
    ],
)
def test_known_peak(name: str, tflops: float | None) -> None:
    assert known_peak(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_known_device_is_looked_up_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("torchtitan.observe.device._measure", lambda device, dtype: 50e12)
    assert peak_flops(CUDA, torch.bfloat16) == (989e12, "known for NVIDIA H200 in bfloat16: 989 TFLOP/s")
    assert peak_flops(CUDA, torch.float32) == (50e12, "measured by matrix products in float32: 50 TFLOP/s")


def test_an_unknown_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    monkeypatch.setattr("torchtitan.observe.device._measure", lambda device, dtype: 100e12)
    assert peak_flops(CUDA, torch.bfloat16) == (100e12, "measured by matrix products in bfloat16: 100 TFLOP/s")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measured_on_this_machine(dtype: torch.dtype) -> None:
    drawn = torch.get_rng_state()
    start = time.perf_counter()
    peak, source = peak_flops(CPU, dtype)
    # The measurement is a quarter of a second; this leaves room for whatever else the machine does.
    assert time.perf_counter() - start < 2.0
    assert source.startswith(f"measured by matrix products in {dtype}: ".replace("torch.", ""))
    assert torch.equal(drawn, torch.get_rng_state())
    left = torch.rand(512, 512).to(dtype)
    right = torch.rand(512, 512).to(dtype)
    start = time.perf_counter()
    left @ right.T
    assert peak is not None
    assert 2 * 512**3 / (time.perf_counter() - start) < 1.5 * peak


def test_what_cannot_be_measured_has_no_peak_and_says_why() -> None:
    peak, source = peak_flops(CPU, torch.int64)
    assert peak is None
    assert source.startswith("unknown: cpu could not multiply matrices in int64 (")


def test_cuda_memory_and_its_peaks_begin_anew_with_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        total_memory = 80 * 2**30

    stats: dict[str, Any] = {
        "reserved_bytes.all.peak": 40 * 2**30,
        "reserved_bytes.all.current": 20 * 2**30,
        "active_bytes.all.peak": 32 * 2**30,
        "active_bytes.all.current": 10 * 2**30,
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }

    def reset(device: torch.device) -> None:
        for kind in ("reserved", "active"):
            stats[f"{kind}_bytes.all.peak"] = stats[f"{kind}_bytes.all.current"]

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(stats))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    first, second = memory(CUDA), memory(CUDA)
    assert (first.peak_gib, first.percent, first.active_gib, first.active_percent) == (40.0, 50.0, 32.0, 40.0)
    assert (second.peak_gib, second.active_gib) == (20.0, 10.0)
    assert (first.alloc_retries, first.ooms) == (3, 1)


CHILD = """
import torch
from torchtitan.observe.device import memory
before = memory(torch.device("cpu"))
torch.ones(2**27, dtype=torch.uint8)
after = memory(torch.device("cpu"))
print(before.peak_gib, after.peak_gib, after.percent, after.active_gib)
"""


def test_process_memory_is_its_own_peak_not_that_of_its_parent() -> None:
    held = torch.ones(2**30, dtype=torch.uint8)
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=True)
    before, after, percent, active = child.stdout.split()
    assert held[-1] == 1
    assert 0.02 < float(before) < 0.9
    assert 0.1 < float(after) - float(before) < 0.2
    assert 0 < float(percent) < 100
    assert active == "None"
    assert memory(CPU).peak_gib > 1.0
