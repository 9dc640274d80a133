"""What passes between two lines of metrics: time, steps, waiting for data, and what does not count.

What is derived from it is in ``metrics.py``.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Clock:
    """Seconds, steps and seconds spent waiting for data since it was made."""

    def __init__(self) -> None:
        self.steps = 0
        self.data_seconds = 0.0
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def next_of(self, batches: Iterator[T]) -> T:
        """The next of ``batches``, for which it is waited."""
        start = time.perf_counter()
        found = next(batches)
        self.data_seconds += time.perf_counter() - start
        return found

    @contextmanager
    def paused(self, device: torch.device) -> Iterator[None]:
        """What passes meanwhile does not count; what ``device`` has still to do of the steps before it does."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start
