"""From what the trainer counted to what people read: rates, utilisation, time left, as one record a logged step.

Where a record goes is in ``sinks.py``; nothing is reduced over ranks here, the numbers that come in are global.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan.log import logger
from torchtitan.observe.sinks import SOURCE_TOKENS, Record, Sink, ValidationRecord

if TYPE_CHECKING:
    from torchtitan.observe.device import Memory


@dataclass(frozen=True)
class StepStats:
    """One logged step of the whole job, and what passed since the logged step before it (or since the start).

    ``loss`` is the mean over the valid tokens of the global batch, ``max_loss`` the largest mean of a rank,
    ``tokens_seen`` counts all ranks over the whole run, resumes included; ``data_seconds`` is the share of ``seconds``
    in which this rank waited for data. ``source_tokens`` are the share of each source in ``tokens_seen``, of a blend.
    """

    step: int
    loss: float
    max_loss: float | None
    grad_norm: float
    lr: float
    tokens_seen: int
    tokens: int
    steps: int
    seconds: float
    data_seconds: float
    source_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationStats:
    """What validation after a step found on one set, of name ``set`` (None: the only one and without a name).

    ``loss`` is the mean over its ``tokens``, the valid labels of all ranks, which took ``seconds``.
    """

    step: int
    set: str | None
    loss: float
    tokens: int
    seconds: float


class Metrics:
    """Derives a record from each ``StepStats`` and hands it to every sink.

    ``devices`` is their number in the whole job, ``flops_per_token`` counts attention in full (each query with each
    key), ``flops_per_token_causal`` the half that a causal mask leaves; neither counts recomputation. ``peak_flops`` is
    what one device can reach a second, None if unknown, and then there is no MFU. Nor is there in a step that beats it:
    a machine busy with other things may have measured too low a peak.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        *,
        devices: int,
        flops_per_token: float,
        flops_per_token_causal: float,
        peak_flops: float | None,
        last_step: int,
        memory: Callable[[], Memory],
    ) -> None:
        self.sinks = list(sinks)
        self.devices, self.peak_flops, self.last_step, self.memory = devices, peak_flops, last_step, memory
        self.flops_per_token, self.flops_per_token_causal = flops_per_token, flops_per_token_causal
        self._lines = self._steps = 0
        self._seconds = 0.0
        self._failing: set[int] = set()
        self._beaten = False

    def write(self, stats: StepStats) -> Record:
        """Give the record of ``stats`` to the sinks, and return it.

        A sink whose disk is full or gone costs its lines and one warning, never the run; any other error of a sink is
        a mistake in it, and is raised.
        """
        record = self._record(stats)
        for sink in self.sinks:
            self._give(sink, sink.write, record)
        return record

    def validated(self, stats: ValidationStats) -> ValidationRecord:
        """The same for ``stats`` and the sinks that take them."""
        record = {
            **asdict(stats),
            "tps": stats.tokens / stats.seconds / self.devices,
            **self._memory_fields(self.memory()),
            "wall_time": time.time(),
        }
        for sink in self.sinks:
            if (take := getattr(sink, "validated", None)) is not None:
                self._give(sink, take, record)
        return record

    def _give(self, sink: Sink, take: Callable[[Any], None], record: dict[str, Any]) -> None:
        try:
            take(record)
        except OSError as error:
            self._warn_once(sink, error)

    def close(self) -> None:
        """Close all sinks, those after a failing one too."""
        failure: Exception | None = None
        for sink in self.sinks:
            try:
                sink.close()
            except OSError as error:
                self._warn_once(sink, error)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _record(self, stats: StepStats) -> Record:
        memory = self.memory()
        tps = stats.tokens / stats.seconds / self.devices
        return {
            "step": stats.step,
            "loss": stats.loss,
            "max_loss": stats.max_loss,
            "grad_norm": stats.grad_norm,
            "lr": stats.lr,
            "tokens_seen": stats.tokens_seen,
            "tps": tps,
            "tflops": self.flops_per_token * tps / 1e12,
            "mfu": self._utilisation(self.flops_per_token * tps),
            "mfu_causal": self._utilisation(self.flops_per_token_causal * tps),
            **self._memory_fields(memory),
            "alloc_retries": memory.alloc_retries,
            "ooms": memory.ooms,
            "data_loading_seconds": stats.data_seconds / stats.steps,
            "data_loading_percent": 100 * stats.data_seconds / stats.seconds,
            "step_seconds": stats.seconds / stats.steps,
            "seconds_left": self._seconds_left(stats),
            "wall_time": time.time(),
            **{f"{SOURCE_TOKENS}{name}": tokens for name, tokens in stats.source_tokens.items()},
        }

    @staticmethod
    def _memory_fields(memory: Memory) -> Record:
        return {
            "memory_gib": memory.peak_gib,
            "memory_percent": memory.percent,
            "memory_active_gib": memory.active_gib,
            "memory_active_percent": memory.active_percent,
        }

    def _utilisation(self, flops: float) -> float | None:
        if self.peak_flops is None:
            return None
        if flops <= self.peak_flops:
            return 100 * flops / self.peak_flops
        if not self._beaten:
            self._beaten = True
            logger.warning(
                f"{flops / 1e12:.4g} TFLOP/s are more than the device's peak of {self.peak_flops / 1e12:.4g}; "
                "such steps have no mfu; set metrics.peak_tflops to the true peak"
            )
        return None

    def _seconds_left(self, stats: StepStats) -> float:
        """The steps that remain, at the mean pace of this process so far."""
        if self._lines == 1:
            # The first line is that of the step that warms everything up. It is all there is to go by at first, and is
            # forgotten once there is another.
            self._steps, self._seconds = 0, 0.0
        self._lines += 1
        self._steps += stats.steps
        self._seconds += stats.seconds
        return self._seconds / self._steps * (self.last_step - stats.step)

    def _warn_once(self, sink: Sink, error: OSError) -> None:
        if id(sink) not in self._failing:
            self._failing.add(id(sink))
            logger.warning(f"the metrics of {type(sink).__name__} are not written; training goes on: {error}")
