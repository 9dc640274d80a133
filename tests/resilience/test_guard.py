"""Requests to stop, and collections at the steps that are asked for."""

import gc
import os
import signal
import time

import pytest

from torchtitan.resilience import guard
from torchtitan.resilience.guard import GarbageCollection, StopRequest


@pytest.fixture(autouse=True)
def _handlers_of_the_tests():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_is_a_request(number: signal.Signals) -> None:
    stop = StopRequest()
    assert not stop and stop.reason is None
    os.kill(os.getpid(), number)
    assert stop and stop.reason == number.name


def test_a_second_interrupt_is_no_request_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_SAME_SECONDS", 0.2)
    stop = StopRequest()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # the same one, passed on by a launcher
    assert stop
    time.sleep(0.25)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_first_reason_is_the_one_that_is_told() -> None:
    """The end of a launcher is noticed as a SIGTERM, whatever ended it."""
    stop = StopRequest()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert stop and stop.reason == "SIGUSR1"


def test_time_runs_out() -> None:
    stop = StopRequest(max_duration_minutes=0.05 / 60)
    assert not stop
    time.sleep(0.06)
    assert stop and "max_duration_minutes" in str(stop.reason)


def test_collections_come_every_freq_steps_and_never_by_themselves() -> None:
    collected: list[int] = []
    gc.callbacks.append(callback := lambda phase, info: collected.append(step) if phase == "stop" else None)
    step = 0
    collection = GarbageCollection(3)
    collected.clear()
    try:
        for step in range(1, 10):
            _ = [[] for _ in range(5000)]
            collection.step(step)
    finally:
        collection.close()
        gc.callbacks.remove(callback)
    assert collected == [3, 6, 9]
    assert gc.isenabled()
