"""Shapes of the schedules beyond the curves that tests/peers compares with TorchTitan."""

import math

import pytest

from torchtitan.optim.schedules import SCHEDULES, Schedule


def schedule(total: int, **options: object) -> Schedule:
    return SCHEDULES.bind("warmup_stable_decay", options, key="lr_scheduler")(total)


def test_constant_never_decays() -> None:
    factor = schedule(100, warmup_steps=4, decay_type="constant")
    assert [factor(step) for step in (1, 2, 4, 5, 50, 100)] == [0.25, 0.5, 1, 1, 1, 1]


def test_the_floor_is_reached_one_step_after_the_last() -> None:
    for shape in ("linear", "sqrt", "cosine"):
        factor = schedule(10, warmup_steps=0, decay_type=shape, min_lr_factor=0.1)
        assert factor(10) > 0.1
        assert factor(11) == pytest.approx(0.1)
        assert factor(500) == pytest.approx(0.1)  # no second rise, nothing negative


def test_cosine_halves_in_the_middle() -> None:
    assert schedule(10, warmup_steps=0, decay_type="cosine")(6) == pytest.approx(0.5)
    assert schedule(10, warmup_steps=0, decay_type="sqrt")(6) == pytest.approx(1 - math.sqrt(0.5))


def test_a_warm_up_longer_than_the_schedule_is_cut() -> None:
    factor = schedule(4, warmup_steps=200)
    assert [factor(step) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]
