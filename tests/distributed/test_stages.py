"""Plans of pipelines: how models are cut, what is refused and what is said of it, before any process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_schedules import of_torch
from torchtitan.distributed.stages import check_micro_batches, describe, plan_pipeline, split_stages
from torchtitan.errors import ConfigError
from torchtitan.models.spec import Layout

LAYOUT = Layout(stem=("tok_embeddings",), blocks="layers", head=("norm", "output"))


def names(blocks: int) -> list[str]:
    return [str(i) for i in range(blocks)]


def sizes(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


@pytest.mark.parametrize(
    ("blocks", "stages", "first", "last", "expected"),
    [
        (4, 2, 0, 0, [2, 2]),
        (5, 2, 1, 1, [3, 2]),
        (7, 4, 1, 1, [2, 2, 2, 1]),
        (7, 4, 0, 0, [2, 2, 2, 1]),
        (6, 4, 1, 1, [1, 2, 2, 1]),
        (4, 4, 1, 1, [1, 1, 1, 1]),
        (5, 4, 1, 1, [1, 2, 1, 1]),
        (8, 4, 1, 1, [2, 2, 2, 2]),
        (8, 2, 3, 1, [3, 5]),
        (6, 3, 9, 0, [1, 3, 2]),
        (126, 16, 1, 1, [7, *[8] * 14, 7]),
        (3, 1, 1, 1, [3]),
    ],
)
def test_layers_are_even_where_embedding_and_head_count(
    blocks: int, stages: int, first: int, last: int, expected: list[int]
) -> None:
    split = split_stages(LAYOUT, names(blocks), stages, first=first, last=last)
    assert sizes(split) == expected
    everything = ["tok_embeddings", *(f"layers.{i}" for i in range(blocks)), "norm", "output"]
    assert [name for stage in split for name in stage] == everything
    assert split[0][0] == "tok_embeddings" and split[-1][-2:] == ("norm", "output")


@pytest.mark.parametrize(
    ("schedule", "degree", "layers_per_stage", "expected", "placement"),
    [
        ("1f1b", 2, None, [4, 4], (0, 1)),
        ("GPipe", 4, None, [2, 2, 2, 2], (0, 1, 2, 3)),
        ("Interleaved1F1B", 2, None, [2, 2, 2, 2], (0, 1, 0, 1)),
        ("DualPipeV", 2, None, [2, 2, 2, 2], (0, 1, 1, 0)),
        ("LoopedBFS", 2, 2, [1, 2, 2, 2, 1], None),
        ("LoopedBFS", 2, 3, [2, 2, 2, 2], (0, 1, 0, 1)),
        ("InterleavedZeroBubble", 2, 1, None, None),
        ("1F1B", 2, 5, [4, 4], (0, 1)),
    ],
)
def test_how_many_stages(
    schedule: str, degree: int, layers_per_stage: int | None, expected: list[int] | None, placement: Any
) -> None:
    def plan() -> Any:
        return plan_pipeline(LAYOUT, names(8), degree=degree, schedule=schedule, layers_per_stage=layers_per_stage)

    if placement is None:
        with pytest.raises(ConfigError):
            plan()
    else:
        assert sizes(plan().stages) == expected
        assert plan().placement == placement


LISTS = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"degree": 4}, "pipeline_parallel_degree", "4 stages need a layer each, but there are 3; lower"),
        (
            {"degree": 2, "schedule": "ZBVZeroBubble"},
            "pipeline_parallel_degree",
            "4 stages need a layer each, but there are 3",
        ),
        ({"degree": 2, "schedule": "2F2B"}, "pipeline_parallel_schedule", "unknown schedule '2F2B'"),
        (
            {"degree": 2, "layers_per_stage": 2},
            "pipeline_parallel_layers_per_stage",
            "2 makes 3 stages of 5 layers, 2 of which stand for embedding and head, but 1F1B needs 1 on each of 2 "
            "ranks; try 3, 4",
        ),
        (
            {"degree": 2, "layers_per_stage": 3, "schedule": "LoopedBFS"},
            "pipeline_parallel_layers_per_stage",
            "LoopedBFS needs two, three or more on each of 2 ranks",
        ),
        (
            {"degree": 2, "layers_per_stage": 3, "module_fqns": LISTS},
            "pipeline_parallel_layers_per_stage",
            "module_fqns_per_model_part says already what each stage has",
        ),
        (
            {"degree": 3, "module_fqns": LISTS},
            "module_fqns_per_model_part",
            "these are 2 stages, but 1F1B needs 1 on each of 3 ranks",
        ),
        (
            {"degree": 2, "module_fqns": [LISTS[0], ["layers.1", "layers.9", "norm", "output"]]},
            "module_fqns_per_model_part",
            "the model has no 'layers.9'; its modules are tok_embeddings, layers.0, layers.1, layers.2, norm, output",
        ),
        (
            {"degree": 2, "module_fqns": [LISTS[0], ["layers.0", *LISTS[1]]]},
            "module_fqns_per_model_part",
            "layers.0 comes twice; leave it in one list",
        ),
        (
            {"degree": 2, "module_fqns": [LISTS[0], ["layers.2", "output"]]},
            "module_fqns_per_model_part",
            "layers.1, norm missing; add to one of the lists",
        ),
        (
            {"degree": 2, "module_fqns": [LISTS[1], LISTS[0]]},
            "module_fqns_per_model_part",
            "layers.1 stands where tok_embeddings must",
        ),
        (
            {"degree": 3, "module_fqns": [LISTS[0], [], LISTS[1]]},
            "module_fqns_per_model_part",
            "list 1 (from 0) is empty",
        ),
    ],
)
def test_plans_that_cannot_be_run(values: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_pipeline(LAYOUT, names(3), **values)
    assert refused.value.key == f"parallelism.{key}"
    assert said in refused.value.problem


def test_stages_may_have_no_layer_where_the_user_says_so() -> None:
    lists = [["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], ["norm", "output"]]
    plan = plan_pipeline(LAYOUT, names(3), degree=3, module_fqns=lists)
    assert plan.stages == tuple(tuple(stage) for stage in lists)
    assert [plan.stage_of(name) for name in ("tok_embeddings.weight", "layers.2.ffn_norm.weight", "output.weight")] == [
        *(0, 1, 2)
    ]


def test_layer_1_is_not_layer_10() -> None:
    plan = plan_pipeline(LAYOUT, names(12), degree=4)
    assert plan.stage_of("layers.1.attention.wq.weight") == 0
    assert plan.stage_of("layers.10.attention.wq.weight") == 3
    with pytest.raises(LookupError):
        plan.stage_of("layers.12.attention.wq.weight")


def test_a_file_decides_on_stages_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    of_torch("ZBVZeroBubble", 2, 4, 5)._dump_csv(str(path), "compute_only")
    plan = plan_pipeline(LAYOUT, names(6), degree=2, schedule="1F1B", csv=str(path))
    assert (plan.schedule, plan.placement, sizes(plan.stages)) == (str(path), (0, 1, 1, 0), [1, 2, 2, 1])
    assert [plan.indices_of(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert plan.stages_of(1) == plan.stages[1:3]
    assert plan.splits_backward
    check_micro_batches(plan, 5)
    with pytest.raises(ConfigError, match=r"makes 6 micro-batches, but .*_csv is for 5; set it to 5 ×") as refused:
        check_micro_batches(plan, 6)
    assert refused.value.key == "training.local_batch_size"
    for values, said in (
        ({"layers_per_stage": 4}, "makes 2 stages .* is for 4; try 2"),
        ({"module_fqns": LISTS}, "layers.3, layers.4, layers.5 missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan_pipeline(LAYOUT, names(6), degree=2, csv=str(path), **values)
    with pytest.raises(ConfigError, match="4 stages need a layer each") as refused:
        plan_pipeline(LAYOUT, names(3), degree=2, csv=str(path))
    assert refused.value.key == "parallelism.pipeline_parallel_schedule_csv"


def test_which_plans_split_backward_passes(tmp_path: Path) -> None:
    for name, splits in (("1F1B", False), ("LoopedBFS", False), ("DualPipeV", True), ("InterleavedZeroBubble", True)):
        assert plan_pipeline(LAYOUT, names(8), degree=2, schedule=name).splits_backward == splits
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert not plan_pipeline(LAYOUT, names(8), degree=2, csv=str(path)).splits_backward


@pytest.mark.parametrize(
    ("schedule", "number", "said"),
    [
        ("1F1B", 4, None),
        (
            "1F1B",
            3,
            "makes 3 micro-batches for 4 stages on 4 ranks, but 1F1B takes at least one for each stage; set it to"
            " 4 × parallelism.pipeline_parallel_microbatch_size, with a global batch to match, or parallelism"
            ".pipeline_parallel_schedule to GPipe",
        ),
        ("GPipe", 1, None),
        ("Interleaved1F1B", 7, None),
        ("Interleaved1F1B", 9, "set it to 8 or 10 × .*, or parallelism.pipeline_parallel_schedule to LoopedBFS"),
        ("LoopedBFS", 9, None),
        ("ZBVZeroBubble", 1, None),
        ("DualPipeV", 7, "8 stages on 4 ranks, but DualPipeV takes at least one for each stage; set it to 8 ×"),
        ("DualPipeV", 8, None),
    ],
)
def test_numbers_of_micro_batches(schedule: str, number: int, said: str | None) -> None:
    plan = plan_pipeline(LAYOUT, names(8), degree=4, schedule=schedule)
    if said is None:
        check_micro_batches(plan, number)
        return
    with pytest.raises(ConfigError, match=said) as refused:
        check_micro_batches(plan, number)
    assert refused.value.key == "training.local_batch_size"


def test_the_sentence_names_the_bubble_and_what_lowers_it(tmp_path: Path) -> None:
    plan = plan_pipeline(LAYOUT, names(8), degree=4)
    said = describe(plan, 8)
    assert said == (
        "Pipeline: 1F1B runs 8 micro-batches through 4 stages on 4 ranks, which wait 27.3% of the time; "
        "15.8% with 16 micro-batches, 5.9% with InterleavedZeroBubble"
    )
    assert "InterleavedZeroBubble" not in describe(plan_pipeline(LAYOUT, names(7), degree=4), 8)  # too few layers
    best = describe(plan_pipeline(LAYOUT, names(8), degree=4, schedule="ZBVZeroBubble"), 8)
    assert best.endswith("wait 5.9% of the time; 3.0% with 16 micro-batches")
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert describe(plan_pipeline(LAYOUT, names(2), degree=2, csv=str(path)), 1).endswith(
        "own.csv runs 1 micro-batches through 2 stages on 2 ranks, which wait 50.0% of the time"
    )
