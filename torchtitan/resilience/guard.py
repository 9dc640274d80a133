"""When a run has to stop before its last step: signals and the time limit, and the pauses of garbage collection.

Saving is the checkpointer's work; that all ranks stop at the same step is the trainer's.
"""

import gc
import signal
import time
from types import FrameType

from torchtitan.log import logger
from torchtitan.platforms import SIGNALS

_SAME_SECONDS = 2.0
"""One Ctrl-C may come twice so soon: to the whole job at once, and passed on by a launcher."""


def die_when_signalled() -> None:
    """End at once when asked to stop, even inside a wait for other ranks, where Python's own handlers never run."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Let nothing end this process any more but itself: it has nothing left to save, and its exit code is to be seen.

    Whoever leaves first makes torchrun end the others, which Python leaves without handlers on their way out.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Becomes true once this process is asked to stop, by a signal or by ``max_duration_minutes`` running out.

    The minutes count from ``started`` (``time.monotonic()``; None: now). The step in progress ends as usual. A second
    Ctrl-C, seconds after the first, stops at once.
    """

    def __init__(self, max_duration_minutes: float | None = None, started: float | None = None) -> None:
        self.reason: str | None = None
        self._interrupted: float | None = None
        begin = time.monotonic() if started is None else started
        self._deadline = None if max_duration_minutes is None else begin + 60 * max_duration_minutes
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted > _SAME_SECONDS:
                raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name

    def __bool__(self) -> bool:
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "the time limit (job.max_duration_minutes)"
        return self.reason is not None


class GarbageCollection:
    """Collects every ``freq`` steps, on all ranks at the same step, instead of whenever Python likes to.

    One rank that pauses makes all the others wait for it.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq
        gc.disable()
        gc.collect(1)

    def step(self, step: int) -> None:
        if step > 1 and step % self._freq == 0:
            start = time.perf_counter()
            gc.collect(1)
            logger.debug(f"garbage collection took {time.perf_counter() - start:.2f} s")

    def close(self) -> None:
        gc.enable()
