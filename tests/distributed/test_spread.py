"""What a configuration's parallelism keys come to, and what of them is refused before any process starts."""

from pathlib import Path

import pytest

from torchtitan.config import load_config
from torchtitan.distributed.spread import Spread, micro_batches, plan_spread
from torchtitan.errors import ConfigError
from torchtitan.models.spec import MODELS
from torchtitan.resolve.model import resolve_args


def plan(ranks: int, *words: str) -> Spread:
    argv = [f"--{word}" if "." in word.split("=")[0] else f"--parallelism.{word}" for word in words]
    config = load_config(argv)
    spec = MODELS.get(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    training = config.training
    spread = plan_spread(
        config.parallelism,
        spec,
        args,
        world_size=ranks,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
    )
    micro_batches(spread, training.local_batch_size * spread.degrees.readers, training.local_batch_size)
    return spread


PP2, PP4 = "pipeline_parallel_degree=2", "pipeline_parallel_degree=4"


@pytest.mark.parametrize(
    ("ranks", "words", "key", "said"),
    [
        (8, ["tensor_parallel_degree=3"], "tensor_parallel_degree", "does not divide the 8 processes"),
        (32, ["tensor_parallel_degree=32"], "tensor_parallel_degree", "16 query heads; try 1, 2, 4, 8, 16"),
        (4, ["tensor_parallel_degree=4", "model.args.n_kv_heads=2"], "tensor_parallel_degree", "try 1, 2"),
        (2, ["tensor_parallel_degree=2", "training.seq_len=33"], "training.seq_len", "try 32"),
        (2, ["context_parallel_degree=2", "training.seq_len=34"], "training.seq_len", "32 or 36"),
        (
            4,
            ["context_parallel_degree=4", "context_parallel_method=ulysses", "model.args.n_kv_heads=2"],
            "context_parallel_degree",
            "gather",
        ),
        (4, [PP4, "training.local_batch_size=2"], "training.local_batch_size", "GPipe"),
        (8, ["pipeline_parallel_degree=8"], "pipeline_parallel_degree", "there are 6"),
        (
            2,
            [PP2, "pipeline_parallel_schedule=ZBVZeroBubble", "fsdp_reshard_after_forward=always"],
            "fsdp_reshard_after_forward",
            "default",
        ),
        (2, [PP2, "pipeline_parallel_microbatch_size=3"], "pipeline_parallel_microbatch_size", "try 1, 2, 4, 8"),
        (
            2,
            [PP2, "pipeline_parallel_schedule=DualPipeV", "training.local_batch_size=2"],
            "training.local_batch_size",
            "at least one for each stage",
        ),
        (2, [PP2, "module_fqns_per_model_part=[['tok_embeddings'],['norm','output']]"], "module_fqns", "missing"),
        (2, [PP2, "module_fqns_per_model_part=[['tok_embeddings','layer.0'],[]]"], "module_fqns", "is empty"),
        (2, [PP2, "pipeline_parallel_schedule_csv=/no/such.csv"], "pipeline_parallel_schedule_csv", "cannot read"),
        (2, [PP2, "pipeline_parallel_layers_per_stage=2"], "pipeline_parallel_layers_per_stage", "try 4"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(ranks: int, words: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        plan(ranks, *words)
    assert refused.value.key is not None and key in refused.value.key
    assert "\n" not in str(refused.value)


def test_malformed_schedules_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,0B0\n1F0,1G0\n")
    with pytest.raises(ConfigError, match="row 2, column 2"):
        plan(2, PP2, f"pipeline_parallel_schedule_csv={path}")


def test_weights_stay_gathered_in_a_pipeline_unless_asked() -> None:
    assert plan(2, PP2).reshard == "never"
    assert plan(2, PP2, "fsdp_reshard_after_forward=always").reshard == "always"
    assert plan(2).reshard == "default"


def test_batches_are_multiples_of_a_micro_batch() -> None:
    spread = plan(4, PP2, "pipeline_parallel_microbatch_size=4")
    assert spread.rows_multiple == 4
    assert micro_batches(spread, 16, 8) == 2
    # Two readers, three rows each: filled up to one micro-batch, which 1F1B over two stages cannot run.
    with pytest.raises(ConfigError, match=r"makes 1 micro-batches.* set it to 2 × 2 readers ×") as refused:
        micro_batches(spread, 6, 8)
    assert refused.value.key == "training.global_batch_size", "the local batch is not to blame"


def test_keys_that_change_nothing_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert plan(1, "pipeline_parallel_schedule=DualPipeV", "context_parallel_method=ulysses").pipeline is None
    assert "parallelism.pipeline_parallel_schedule changes nothing while" in caplog.text
    assert "parallelism.context_parallel_method changes nothing while" in caplog.text
    caplog.clear()
    path = tmp_path / "order.csv"
    path.write_text("\ufeff" + ",".join(f"0{kind}{m}" for kind in "FB" for m in range(8)) + "\n", encoding="utf-8")
    path.write_text(path.read_text() + ",".join(f"1{kind}{m}" for kind in "FB" for m in range(8)), encoding="utf-8")
    spread = plan(2, PP2, f"pipeline_parallel_schedule_csv={path}", "pipeline_parallel_schedule=GPipe")
    assert spread.pipeline is not None and spread.pipeline.order is not None
    assert "parallelism.pipeline_parallel_schedule changes nothing beside" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n999999F0,999999B0\n", "stage 1 is missing"),
        ("0F0,0B0\n9999999999F0\n", "is no action"),
        ("0F0,0F" + "9" * 5000 + "\n1F0\n", "…' is no action"),
    ],
)
def test_absurd_schedules_are_refused_at_once_and_in_short(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        plan(2, PP2, f"pipeline_parallel_schedule_csv={path}")
    assert len(str(refused.value)) < 300
    with pytest.raises(ConfigError, match="is no file"):
        plan(2, PP2, "pipeline_parallel_schedule_csv=/dev/zero")


def test_one_stage_a_rank_is_advised_only_where_it_would_help() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(8, "pipeline_parallel_degree=8")
    assert "1F1B" not in str(refused.value)
    with pytest.raises(ConfigError, match="to 1F1B"):
        plan(4, PP4, "pipeline_parallel_schedule=ZBVZeroBubble")
