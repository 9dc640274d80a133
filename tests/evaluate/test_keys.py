"""``[validation]`` before a run: what it comes to, and what is refused in one line that names its key."""

from pathlib import Path

import numpy as np
import pytest

from tests.runs import tiny_argv
from torchtitan.config import describe_error, load_config
from torchtitan.errors import ConfigError
from torchtitan.evaluate import open_held_out
from torchtitan.resolve.job import Job, resolve_job

PYTHON_DOCS = "dataset=python_docs"


def resolve(folder: Path, *words: str, ranks: int = 1) -> Job:
    """A job of seq_len 48 that validates; ``words`` are keys of ``[validation]`` unless they name a section."""
    argv = [f"--{word}" if "." in word.partition("=")[0] else f"--validation.{word}" for word in words]
    argv = tiny_argv(folder, "--validation.enable", *argv)
    if "--model.name=gpt2" in argv:  # which has other sizes
        argv = [word for word in argv if not word.startswith("--model.args=")]
    return resolve_job(load_config(argv), ranks)


def test_what_is_left_out_is_that_of_training(tmp_path: Path) -> None:
    plan = resolve(tmp_path, PYTHON_DOCS, "training.local_batch_size=3").validation
    assert plan is not None
    assert (plan.seq_len, plan.local_batch_size) == (48, 3)
    assert list(plan.sets) == [None]
    plan = resolve(tmp_path, PYTHON_DOCS, "seq_len=24", "local_batch_size=5").validation
    assert plan is not None
    assert (plan.seq_len, plan.local_batch_size) == (24, 5)


def test_nothing_is_looked_at_where_it_is_off(tmp_path: Path) -> None:
    assert resolve_job(load_config(tiny_argv(tmp_path, "--validation.dataset_path=nowhere")), 1).validation is None


TP2, CP2, PP2 = (f"parallelism.{axis}_parallel_degree=2" for axis in ("tensor", "context", "pipeline"))


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["freq=0"], "validation.freq", "at least 1"),
        (["freq=-1"], "validation.freq", "at least 1"),
        (["steps=0"], "validation.steps", "-1 or at least 1"),
        (["local_batch_size=0"], "validation.local_batch_size", "at least 1"),
        (["dataset=jsonk"], "validation.dataset", "did you mean jsonl"),
        (["dataset=jsonl"], "validation.dataset_path", "needs a file"),
        (["dataset=text", "dataset_path=nowhere"], "validation.dataset_path", "no file, folder or glob"),
        (["validation.args.texts=x"], "validation.args.texts", "unknown key"),
        (
            ["validation.dataloader.prefetch_factor=2"],
            "validation.dataloader.prefetch_factor",
            "validation.dataloader.num_w",
        ),
        (["model.name=gpt2", "model.args.max_seq_len=48", "seq_len=49"], "validation.seq_len", "48"),
        (["sets=[{dataset='jsonl'}]"], "validation.sets[0].name", "missing"),
        (["sets=[{name='a', dataset='jsonl'}]"], "validation.sets[0].dataset_path", "needs a file"),
        (
            ["sets=[{name='a', dataset='python_docs'}, {name='a', dataset='python_docs'}]"],
            "validation.sets[1].name",
            "'a' is a set already",
        ),
        (["dataset=text", "sets=[{name='a', dataset='python_docs'}]"], "validation.dataset", "validation.sets names"),
    ],
)
def test_refused(tmp_path: Path, words: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(tmp_path, *words)
    assert refused.value.key == key
    assert said in describe_error(refused.value)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        ([TP2, "seq_len=33"], "validation.seq_len", "try 32"),
        ([CP2, "seq_len=34"], "validation.seq_len", "32 or 36"),
        (
            [PP2, "parallelism.pipeline_parallel_microbatch_size=2", "local_batch_size=3"],
            "validation.local_batch_size",
            "try 2",
        ),
    ],
)
def test_refused_in_a_layout(tmp_path: Path, words: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(tmp_path, "training.local_batch_size=6", *words, ranks=2)
    assert refused.value.key == key
    assert said in describe_error(refused.value)


def test_steps_without_a_limit_make_the_batch_mean_nothing_which_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve(tmp_path, PYTHON_DOCS, "global_batch_size=4", "steps=2")
    assert "changes nothing" not in caplog.text
    resolve(tmp_path, PYTHON_DOCS, "global_batch_size=4")
    assert "validation.global_batch_size changes nothing" in caplog.text


@pytest.mark.parametrize("several", [True, False])
def test_what_is_wrong_with_a_row_names_the_set(tmp_path: Path, several: bool) -> None:
    np.array([1, 2, 3, 999, 4, 5], "<u2").tofile(tmp_path / "x.ds")
    place = f"dataset = 'nanoset', dataset_path = '{tmp_path / 'x.ds'}', token_bytes = 2"
    one = [f"--validation.dataset_path={tmp_path / 'x.ds'}", "--validation.dataset=nanoset"]
    words = (
        [f"--validation.sets=[{{name = 'held', {place}}}]"] if several else [*one, "--validation.args.token_bytes=2"]
    )
    job = resolve_job(load_config(tiny_argv(tmp_path, "--validation.enable=true", *words)), 1)
    (held_out,) = open_held_out(job, rank=0, ranks=1)
    table = held_out.rows(None)
    with pytest.raises(ConfigError, match="token 3 is 999") as refused:
        [table[row] for row in range(len(table))]
    assert refused.value.key == ("validation.sets[0].dataset_path" if several else "validation.dataset_path")


def test_options_of_an_order_are_refused(tmp_path: Path) -> None:
    np.array([1, 2, 3], "<u2").tofile(tmp_path / "x.ds")
    words = [f"--validation.dataset_path={tmp_path / 'x.ds'}", "--validation.dataset=nanoset"]
    options = ["--validation.args.token_bytes=2", "--validation.args.order_seed=7"]
    with pytest.raises(ConfigError, match="orders what is trained on, not this") as refused:
        resolve_job(load_config(tiny_argv(tmp_path, "--validation.enable=true", *words, *options)), 1)
    assert refused.value.key == "validation.args.order_seed"
