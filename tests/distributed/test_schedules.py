"""The order that each schedule computes in, what it costs, and that torch still has what runs it."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from torch import nn

from torchtitan.config.schema import ScheduleName
from torchtitan.distributed.schedules import (
    SCHEDULES,
    Action,
    Order,
    Stuck,
    bubble,
    find_schedule,
    order_of,
    place_stages,
)
from torchtitan.errors import ConfigError


def rows(text: str) -> Order:
    """An order written as the actions of each rank, a line a rank."""
    return tuple(
        tuple((Action(word[1], int(word[0]), int(word[2])),) for word in line.split()) for line in text.splitlines()
    )


def of_torch(name: str, ranks: int, stages: int, n: int) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage = SimpleNamespace(submod=nn.Module(), num_stages=stages, group_size=ranks, group_rank=0)
    single = SCHEDULES[name].stages_a_rank == 1
    return get_schedule_class(name)(stage if single else [stage] * (stages // ranks), n)


@pytest.mark.parametrize(
    ("name", "ranks", "n", "expected"),
    [
        ("GPipe", 2, 2, "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"),
        ("1F1B", 2, 3, "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"),
        ("1F1B", 3, 3, "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1B0 1F2 1B1 1B2\n2F0 2B0 2F1 2B1 2F2 2B2"),
    ],
)
def test_orders_written_out(name: str, ranks: int, n: int, expected: str) -> None:
    assert order_of(name, ranks, ranks, n) == rows(expected)


def test_ranks_wait_as_the_papers_say() -> None:
    for p in (2, 4, 8):
        for m in (p, 2 * p, 5 * p):
            for name in ("1F1B", "GPipe"):
                assert bubble(order_of(name, p, p, m)) == pytest.approx((p - 1) / (m + p - 1))
            # Narayanan et al. 2021, section 2.2: v stages on a rank divide the bubble time by v.
            for v in (2, 3):
                assert bubble(order_of("Interleaved1F1B", p, p * v, m)) == pytest.approx((p - 1) / (v * m + p - 1))
    # Qi et al. 2023: with F = I = W, ZB-V keeps only the p - 1 forward passes of the first and the last stage.
    assert bubble(order_of("ZBVZeroBubble", 4, 8, 8)) == pytest.approx(3 / (6 * 8 + 3))


def test_overlapped_actions_take_the_time_of_both() -> None:
    step = (Action("F", 0, 1), Action("B", 0, 0))
    assert bubble((((Action("F", 0, 0),), step, (Action("B", 0, 1),)),)) == 0.0
    waits = rows("0F0 0F1\n1F0 1F1")
    assert bubble(waits) == pytest.approx(1 / 3)


def test_an_order_that_cannot_run_is_stuck() -> None:
    with pytest.raises(Stuck, match="rank 1 waits at 1B0 for 1F0"):
        bubble(rows("0F0 0B0\n1B0 1F0"))
    with pytest.raises(Stuck, match="rank 0 waits at 0B0 for 1B0"):
        bubble(rows("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    with pytest.raises(Stuck, match="rank 0 waits at 0W0 for 0B0"):
        bubble(rows("0F0 0W0 0I0"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_fits_is_what_torch_runs(name: str) -> None:
    """The words of ``fits`` are checked before processes start; here against torch's own refusals."""
    for ranks in (2, 3, 4):
        for a_rank in [SCHEDULES[name].stages_a_rank] if SCHEDULES[name].stages_a_rank else [2, 3]:
            stages = ranks * a_rank
            for n in range(1, 14):
                try:
                    of_torch(name, ranks, stages, n)
                except ValueError:
                    assert not SCHEDULES[name].fits(ranks, stages, n), (ranks, stages, n)
                    continue
                assert SCHEDULES[name].fits(ranks, stages, n), (ranks, stages, n)
                order = order_of(name, ranks, stages, n)
                assert 0 < bubble(order) < 1
                check_complete(name, order, place_stages(name, ranks, stages), n)


def check_complete(name: str, order: Order, placement: tuple[int, ...], n: int) -> None:
    actions = [(rank, action) for rank, steps in enumerate(order) for step in steps for action in step]
    assert all(placement[action.stage] == rank for rank, action in actions)
    done = [action for _, action in actions]
    assert len(done) == len(set(done))
    assert any(action.kind == "I" for action in done) == SCHEDULES[name].splits_backward
    for stage in range(len(placement)):
        for m in range(n):
            kinds = "".join(kind for kind in "FBIW" if Action(kind, stage, m) in done)
            assert kinds in ("FB", "FIW"), (stage, m, kinds)


def test_placements() -> None:
    assert place_stages("1F1B", 3, 3) == (0, 1, 2)
    assert place_stages("Interleaved1F1B", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert place_stages("ZBVZeroBubble", 3, 6) == (0, 1, 2, 2, 1, 0)


def test_names_are_found_in_any_case() -> None:
    assert find_schedule("zbvzerobubble") == "ZBVZeroBubble"
    assert find_schedule("1f1b") == "1F1B"
    assert set(get_args(ScheduleName)) == set(SCHEDULES), "the configuration lists them too"
    with pytest.raises(ConfigError, match="did you mean Interleaved1F1B") as refused:
        find_schedule("Interleave1F1B")
    assert refused.value.key == "parallelism.pipeline_parallel_schedule"


def test_private_names_of_pipelining_still_exist() -> None:
    """All that ``schedules.py`` and ``pipeline.py`` use of torch without a public way."""
    from torch.distributed.pipelining import PipelineStage, schedules

    assert schedules._Action(0, schedules._ComputationType("F"), 1, None).is_compute_op
    words = {"F", "B", "I", "W", "OVERLAP_F_B", "UNSHARD", "RESHARD", "SEND_F", "RECV_F"}
    assert words <= {kind.value for kind in schedules._ComputationType}
    assert callable(schedules._PipelineScheduleRuntime._prepare_schedule_with_comms)
    assert callable(PipelineStage._get_init_p2p_neighbors_ops)
    assert callable(PipelineStage._prepare_forward_infra)
    assert "fwd_cache" in PipelineStage.__init__.__globals__["_PipelineStageBase"].__init__.__code__.co_names
    for name, family in SCHEDULES.items():
        ranks = 2
        schedule = of_torch(name, ranks, ranks * (family.stages_a_rank or 2), 4)
        assert isinstance(schedule, schedules._PipelineScheduleRuntime) == (family.stages_a_rank != 1)
        if family.stages_a_rank != 1:
            assert set(schedule.pipeline_order) == set(schedule.pipeline_order_with_comms) == {0, 1}
