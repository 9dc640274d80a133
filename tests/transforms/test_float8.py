"""Float8: which maps become such, what is refused, and what a run leaves for others."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.launch import run_ranks
from tests.runs import run_jobs, tiny_argv
from tests.transforms.float8_training import final_losses
from torchtitan import log
from torchtitan.checkpoint.huggingface.files import WeightFolder
from torchtitan.config import load_config
from torchtitan.errors import ConfigError
from torchtitan.models.spec import MODELS
from torchtitan.resolve.job import resolve_job
from torchtitan.resolve.model import resolve_args
from torchtitan.transforms import CONVERTERS
from torchtitan.transforms.float8 import NAME, SMALL, Float8, is_float8

ON = (f"--model.converters={NAME}",)
EMULATED = (*ON, f"--{NAME}.emulate")


def model(**args: int) -> nn.Module:
    spec = MODELS.get("llama3")
    return spec.build_meta(resolve_args(spec, "debugmodel", {"n_layers": 2, **args}))


def float8_maps(module: nn.Module) -> list[str]:
    return [name for name, inner in module.named_modules() if is_float8(inner)]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    monkeypatch.setattr(log.logger, "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: caplog.messages[-1]


def test_maps_that_stay_are_told_with_the_reason(told: Callable[[], str]) -> None:
    whole = model(vocab_size=2050)
    whole.get_submodule("layers.0.attention.wo").forward = lambda x: x  # type: ignore[method-assign, assignment]
    names = [name for name, _ in whole.named_parameters()]
    converter = Float8("rowwise", ["layers.1.", "wq"], emulate=True)
    converter.check(whole)
    converter(whole)
    assert float8_maps(whole) == [
        *(f"layers.0.attention.{w}" for w in ("wk", "wv")),
        *(f"layers.0.feed_forward.{w}" for w in ("w1", "w2", "w3")),
    ]
    assert [name for name, _ in whole.named_parameters()] == names
    assert told() == (
        "float8 (rowwise): 5 of 15 linear maps; left out: 8 by name, 1 of a class of its own, 1 whose sizes are no "
        "multiples of 16"
    )


@pytest.mark.parametrize(("recipe", "left"), [("tensorwise", ["second", "third"]), ("rowwise", ["third"])])
def test_small_maps_are_left_out_by_recipe(recipe: str, left: list[str]) -> None:
    sizes = {"first": (1024, 1024), "second": (4096, 2048), "third": (2048, 8192)}
    with torch.device("meta"):
        maps = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    Float8(recipe, [SMALL], emulate=True)(maps)  # type: ignore[arg-type]
    assert float8_maps(maps) == left


def test_a_stage_may_lack_what_a_filter_names() -> None:
    stage = model()
    del stage.output
    Float8("rowwise", ["output"], emulate=True)(stage)
    assert len(float8_maps(stage)) == 14


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["filter_fqns=outptu"], "filter_fqns: no linear map has 'outptu' in its name; did you mean output?"),
        (
            ["filter_fqns=zzz"],
            "filter_fqns: no linear map has 'zzz' in its name; names look like layers.0.attention.wq",
        ),
        (
            ["filter_fqns=layers,output"],
            "filter_fqns: float8 (tensorwise) would change none of 15 linear maps; left out: 15 by name; leave it out",
        ),
        (
            [f"filter_fqns={SMALL}", "recipe_name=rowwise_with_gw_hp"],
            f"filter_fqns: torchao has no rule for {SMALL} with rowwise_with_gw_hp; name the maps to leave out",
        ),
        (
            ["enable_fsdp_float8_all_gather"],
            "enable_fsdp_float8_all_gather: weights are gathered as float8 on GPUs only",
        ),
        (
            ["enable_fsdp_float8_all_gather", "recipe_name=rowwise"],
            "enable_fsdp_float8_all_gather: a shard has no whole rows and columns to scale by rowwise",
        ),
        (
            ["precompute_float8_dynamic_scale_for_fsdp"],
            "precompute_float8_dynamic_scale_for_fsdp: there are no gathered float8 weights whose scales it would find",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, words: list[str], line: str) -> None:
    argv = tiny_argv(tmp_path, *EMULATED, *(f"--{NAME}.{word}" for word in words), "--model.args.vocab_size=304")
    with pytest.raises(ConfigError) as caught:
        resolve_job(load_config(argv), 1)
    assert str(caught.value).startswith(f"{NAME}.{line}")


def test_without_a_gpu_it_is_emulated_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{NAME}.emulate: there is no GPU here .* true rounds alike"):
        resolve_job(load_config(tiny_argv(tmp_path, *ON)), 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--training.seq_len=44"],
            "training.local_batch_size: a rank computes 264 tokens at once, and quantize.linear.float8 takes",
        ),
        (
            ["--parallelism.tensor_parallel_degree=2", "--model.args.ffn_dim=48"],
            r"parallelism.tensor_parallel_degree: a rank's part of the 16 outputs of layers.0.attention.wk would be no",
        ),
        (
            [
                "--parallelism.tensor_parallel_degree=2",
                *(f"--{NAME}.enable_fsdp_float8_all_gather", f"--{NAME}.filter_fqns=wk,wv"),
            ],
            f"{NAME}.enable_fsdp_float8_all_gather: weights would have a scale for each tensor rank; set",
        ),
    ],
)
def test_sizes_that_the_hardware_does_not_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=line):
        resolve_job(load_config(tiny_argv(tmp_path, *ON, *words)), 2 if "tensor" in words[0] else 1)


def test_an_older_gpu_is_refused_when_a_run_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = Float8("tensorwise", [], emulate=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=rf"{NAME}.emulate: this GPU \(SM80\) cannot multiply in float8"):
        converter(model())


def test_a_head_in_chunks_is_named_with_the_filter(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, *EMULATED, "--loss.chunks=2", "--model.args.vocab_size=304")
    with pytest.raises(ConfigError, match=rf'loss.chunks: the head, output, .* or {NAME}.filter_fqns to \["output"\]'):
        resolve_job(load_config(argv), 1)
    resolve_job(load_config([*argv, f"--{NAME}.filter_fqns=output"]), 1)


def test_torchao_that_is_not_there_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"model.converters: torchao cannot be used .* pip install 'torchao>="):
        CONVERTERS.get(NAME)(emulate=True)


def test_keys_of_a_converter_that_is_not_asked_for_stay_in_a_file(
    tmp_path: Path, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_noted", set())
    file = tmp_path / "job.toml"
    file.write_text('[quantize.linear.float8]\nfilter_fqns = ["output"]\n')
    config = load_config([f"--job.config_file={file}"])
    assert not config.model.converters and not config.converter_args
    assert told().startswith(f"{NAME}.filter_fqns ({file}) changes nothing: {NAME} is not in model.converters")
    file.write_text('[quantize.linear.float8]\nfilter_fqns = "output"\n')
    with pytest.raises(ConfigError, match=f"{NAME}.filter_fqns: must be a list"):
        load_config([f"--job.config_file={file}"])


def test_both_spellings_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[model]\nconverters = ["float8"]\n[float8]\nrecipe_name = "rowwise"\nemulate = true\n')
    old = load_config([f"--job.config_file={file}"])
    new = load_config([*EMULATED, f"--{NAME}.recipe_name=rowwise"])
    assert old == new and old == load_config(
        ["--float8.enable_float8_linear", "--float8.emulate", "--float8.recipe_name=rowwise"]
    )


def test_checkpoints_know_nothing_of_it(tmp_path: Path) -> None:
    """Weights as they are, whether they are gathered as float8 or not: a run goes on without it, and back; and what is
    left for the Hugging Face library is what it would be."""
    keeps = ("--checkpoint.enable", "--checkpoint.interval=2", "--job.imports=tests.equivalence.float8")
    gathered = ("--model.converters=float8_gathered", "--float8_gathered.precompute")
    checked = ("--validation.enable", "--validation.dataset=jsonl", "--validation.steps=1")
    checked += (f"--validation.dataset_path={tmp_path / 'text.jsonl'}",)
    runs = [
        [*EMULATED, *checked, "--training.steps=2"],
        ["--training.steps=4"],
        [*gathered, "--training.steps=6", "--checkpoint.last_save_in_hf"],
    ]
    runs = [tiny_argv(tmp_path, *keeps, "--lr_scheduler.total_steps=6", *words) for words in runs]
    first, second, last = run_ranks(run_jobs, 1, runs, timeout=200)[0]
    assert (first.steps, second.steps, last.steps) == ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    folder = WeightFolder(str(tmp_path / "run" / "checkpoint" / "step-6-export"))
    assert folder is not None and last.losses[-1] < first.losses[0]


def test_it_trains_like_the_precision_of_the_run(tmp_path: Path) -> None:
    """The short form of scripts/prove_speed.py float8: a smaller model, in float32 for the rest."""
    small = ("--model.args={dim = 64, n_layers = 2, n_heads = 4}", "--training.seq_len=64", "--optimizer.lr=1e-2")
    names = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas_rceil")
    plain, *found = run_ranks(final_losses, 1, tmp_path, "float32", names, 30, *small, timeout=200)[0]
    assert plain < 7  # of 7.6 at the start
    assert [loss for loss in found if not 0.98 < loss / plain < 1.02] == []
