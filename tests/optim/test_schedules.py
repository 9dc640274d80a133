"""Shapes of the schedules beyond the curves that tests/peers compares with TorchTitan."""

import math
from collections.abc import Callable

import pytest

from torchtitan.errors import ConfigError
from torchtitan.optim.schedules import SCHEDULES, Schedule


def schedule(total: int, **options: object) -> Schedule:
    return SCHEDULES.bind("warmup_stable_decay", options, key="lr_scheduler")(total)


def test_constant_never_decays() -> None:
    factor = schedule(100, warmup_steps=4, decay_type="constant")
    assert [factor(step) for step in (1, 2, 4, 5, 50, 100)] == [0.25, 0.5, 1, 1, 1, 1]


def test_the_floor_is_reached_one_step_after_the_last() -> None:
    for shape in ("linear", "sqrt", "cosine", "exponential"):
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


def test_exponential_halves_what_is_left_and_one() -> None:
    """lr = floor + (peak − floor) · (2 · 0.5^progress − 1), as Megatron-LM writes its exponential WSD decay."""
    factor = schedule(10, warmup_steps=0, decay_ratio=0.4, decay_type="exponential", min_lr_factor=0.1)
    assert [factor(step) for step in (6, 7)] == [1.0, 1.0]
    for step in (8, 9, 10, 11):
        expected = 2 * 0.5 ** ((step - 7) / 4) - 1
        assert factor(step) == pytest.approx(0.1 + 0.9 * expected)


def test_every_piece_between_restarts_is_a_curve_of_its_own() -> None:
    options = {"decay_ratio": 0.25, "decay_type": "sqrt", "min_lr_factor": 0.1}
    factor = schedule(24, warmup_steps=4, restarts=[8, 12], restart_warmup_steps=2, **options)
    pieces = [
        schedule(8, warmup_steps=4, **options),
        schedule(4, warmup_steps=2, **options),
        schedule(12, warmup_steps=2, **options),
    ]
    expected = [piece(step) for piece, length in zip(pieces, (8, 4, 12), strict=True) for step in range(1, length + 1)]
    assert [factor(step) for step in range(1, 25)] == expected
    assert factor(9) == 0.5 and factor(11) == factor(15) == 1.0  # warm-ups that end at the full rate
    assert factor(25) == pytest.approx(0.1)


def test_restarts_of_a_cosine_are_sgdr() -> None:
    """Loshchilov and Hutter 2017, equation 5, with periods of 4 and 8."""
    factor = schedule(12, warmup_steps=0, decay_type="cosine", restarts=[4])
    assert [factor(step) for step in range(1, 13)] == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * t / period)) for period in (4, 8) for t in range(period)]
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", lambda x: 1 - x),
        ("sqrt", lambda x: 1 - math.sqrt(x)),
        ("cosine", lambda x: 0.5 * (1 + math.cos(math.pi * x))),
        ("constant", lambda x: 1.0),
        ("exponential", lambda x: 2 * 0.5**x - 1),
    ],
)
def test_without_restarts_there_is_one_curve(shape: str, expected: Callable[[float], float]) -> None:
    """Of 50 steps 3 warm up and the last 15 decay, to a floor one step after them."""
    factor = schedule(50, warmup_steps=3, decay_ratio=0.3, decay_type=shape, restarts=[])
    assert [factor(step) for step in range(1, 4)] == [1 / 3, 2 / 3, 1.0]
    assert {factor(step) for step in range(3, 37)} == {1.0}
    assert [factor(step) for step in range(37, 60)] == [expected(min((step - 36) / 15, 1.0)) for step in range(37, 60)]


@pytest.mark.parametrize(
    ("restarts", "problem"),
    [
        ([8, 4], "must increase, but 4 comes after 8"),
        ([4, 4], "must increase, but 4 comes after 4"),
        ([4, 20], "20 leaves no step after it: the schedule has 20 "),
        ([4, 30], "30 leaves no step after it"),
        ([0], "must be at least 1"),
    ],
)
def test_restarts_that_cannot_be(restarts: list[int], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        schedule(20, restarts=restarts)
    assert refused.value.key == "lr_scheduler.restarts"


def test_a_warm_up_after_no_restart_is_refused() -> None:
    with pytest.raises(ConfigError, match="restart_warmup_steps: there is no restart"):
        schedule(50, restart_warmup_steps=7)


def test_a_decay_of_no_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    schedule(20, warmup_steps=0, restarts=[5, 10], decay_ratio=0.05)
    assert "of 5 steps is no whole step" in caplog.text
