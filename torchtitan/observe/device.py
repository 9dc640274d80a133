"""What the device tells of itself: memory at its peak, and the FLOP/s that MFU divides by.

Nothing is counted or logged here.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_GIB = 2**30

# Dense bfloat16 FLOP/s by the name that torch.cuda.get_device_name gives; the first that matches counts. Whole words:
# a GH200 is no H200 and an A100X no A100. What is not here is measured.
_KNOWN = (
    (r"A100", 312e12),
    (r"H100\b.*\bPCIe", 756e12),
    (r"H100\b.*\bNVL", 835e12),
    (r"H100", 989e12),
    (r"H200\b.*\bNVL", 835e12),
    (r"H200", 989e12),
    (r"H20", 148e12),
    (r"B200", 2250e12),
    (r"MI250X", 191.5e12),  # one of its two dies: that is what a process sees
    (r"MI300X|MI325X", 1300e12),
    (r"MI355X", 2500e12),
)
_SLICE = re.compile(r"\b(MIG|GRID)\b")
"""Marks the name of a part of a device, which has the whole one's name as well."""

_MEASURE_SECONDS = 0.25
_SHORT_SECONDS = 0.004  # a product that takes less is tried in the next size, where it takes eight times as long
_FIRST_SIZE = 128
# Rows of the square matrices that must be tried if there is time (a busy CPU is worst at small ones), and that may be:
# three of 2048 are 48 MiB, little beside a training step.
_SIZES = {"cpu": (512, 2048), "accelerator": (2048, 8192)}


@dataclass(frozen=True)
class Memory:
    """Peak memory in GiB and as a share in percent; None where there is no such thing.

    ``peak_gib`` is what is taken from the device (reserved by torch's allocator), ``active_gib`` what tensors hold of
    it. ``alloc_retries`` and ``ooms`` count over the whole life of the process.
    """

    peak_gib: float
    percent: float
    active_gib: float | None = None
    active_percent: float | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


def memory(device: torch.device) -> Memory:
    """Peak memory of ``device``: on CUDA since the last call, else of this process since it started."""
    if device.type != "cuda":
        peak, total = _peak_resident_bytes(), _total_bytes()
        return Memory(peak / _GIB, 100 * peak / total)
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    reserved, active = (stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("reserved", "active"))
    return Memory(
        peak_gib=reserved / _GIB,
        percent=100 * reserved / total,
        active_gib=active / _GIB,
        active_percent=100 * active / total,
        alloc_retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def _peak_resident_bytes() -> int:
    # Not getrusage where there is a choice: on Linux a process inherits the peak of the one that started it.
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        text = ""
    if match := re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(device: torch.device) -> str:
    """The device in a few words: what it is and how much memory it has."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} with {properties.total_memory / _GIB:.1f} GiB"
    return f"{torch.get_num_threads()} CPU threads, {_total_bytes() / _GIB:.1f} GiB"


def has_fast_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16; where that cannot be told, it is taken to."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "flags" not in flags or bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", flags))


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """FLOP/s that ``device`` can reach in ``dtype``, and where the number comes from; None where it cannot be had.

    From a table for known accelerators in bfloat16, else measured by matrix products in well under a second.
    """
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        if (known := known_peak(name)) is not None:
            return known, f"known for {name} in {kind}: {_tflops(known)}"
    try:
        measured = _measure(device, dtype)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the matrices are no memory of the run
    except RuntimeError as error:  # no kernel for this dtype, no memory
        return None, f"unknown: {device.type} could not multiply matrices in {kind} ({str(error).splitlines()[0]})"
    return measured, f"measured by matrix products in {kind}: {_tflops(measured)}"


def known_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the accelerator that torch calls ``name``; None if unknown or only a slice of one."""
    if _SLICE.search(name):
        return None
    return next((peak for pattern, peak in _KNOWN if re.search(rf"\b(?:{pattern})\b", name)), None)


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of many products, of growing size and in the layouts of a linear layer's three passes.

    Each layout counts: a CPU without bfloat16 units is twenty times slower in one of them than in another.
    """
    generator = torch.Generator(device).manual_seed(0)  # the run's own generator must not feel this
    smallest, largest = _SIZES["cpu" if device.type == "cpu" else "accelerator"]
    layouts: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda a, b, out: torch.mm(a, b.T, out=out),  # output
        lambda a, b, out: torch.mm(a, b, out=out),  # gradient of the input
        lambda a, b, out: torch.mm(a.T, b, out=out),  # gradient of the weight
    ]

    def matrices(size: int) -> list[Tensor]:
        return [torch.rand(size, size, dtype=dtype, device=device, generator=generator) for _ in range(3)]

    def seconds(layout: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        start = time.perf_counter()
        layout(*operands)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    size, best, operands = _FIRST_SIZE, 0.0, matrices(_FIRST_SIZE)
    seconds(layouts[0])  # loads the libraries
    deadline = time.perf_counter() + _MEASURE_SECONDS
    while True:
        times = {}
        for layout in layouts:
            times[layout] = seconds(layout)
            if time.perf_counter() > deadline:
                return max(best, 2 * size**3 / min(times.values()))
        fastest = min(times.values())
        best = max(best, 2 * size**3 / fastest)
        layouts = [layout for layout in layouts if times[layout] < 3 * fastest]
        if size < smallest or (size < largest and fastest < _SHORT_SECONDS):
            size *= 2
            operands = matrices(size)


def _tflops(flops: float) -> str:
    return f"{flops / 1e12:.4g} TFLOP/s"
