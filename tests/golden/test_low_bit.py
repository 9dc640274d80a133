"""Runs whose optimizer keeps its states in eight bits stop and go on: to the bit in the same layout, and with the same
states in any other."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from upath import UPath

from tests.launch import RanksFailed, run_ranks
from tests.runs import run_job, run_jobs, tiny_argv, whole_parameters
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

ARGV = [
    "--model.args={dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=301, multiple_of=64}",
    "--optimizer.name=AdamW8bit",
    "--optimizer.block_size=32",
    '--optimizer.groups=[{pattern = "layers.1.*", name = "AdamWFp8", block_size = 32}]',
    "--optimizer.eps=1e-4",
    "--training.steps=6",
    "--lr_scheduler.total_steps=8",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--checkpoint.keep_latest_k=0",
]
TENSOR = ["--parallelism.tensor_parallel_degree=2"]


def loaded(world: World, argv: list[str]) -> dict[str, Tensor]:
    """The states that a run goes on with, put together, as bytes."""
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    state = {
        f"optimizer.state.{name}.{key}": value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        for name, parameter in trainer.runner.named_parameters
        for key, value in trainer.optimizer.state[parameter].items()
    }
    trainer.close()
    return whole_parameters(state, world)


def stored(step: Path) -> dict[str, Tensor]:
    reader = Reader(UPath(step))
    names = [name for name in reader.tensors if name.startswith("optimizer.state.")]
    tensors = {name: reader.tensor(name) for name in names}
    return {name: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for name, t in tensors.items()}


def test_states_in_eight_bits_go_on_in_any_layout(tmp_path: Path) -> None:
    through, half = run_ranks(
        run_jobs, 2, [tiny_argv(tmp_path, *ARGV), tiny_argv(tmp_path, *ARGV, "--training.steps=3", run="half")]
    )[0]
    assert half.losses == through.losses[:3]
    step = tmp_path / "half" / "checkpoint" / "step-3"
    states = stored(step)
    assert states["optimizer.state.layers.0.attention.wq.weight.exp_avg_codes"].shape == (64, 64)
    assert states["optimizer.state.layers.1.attention.wq.weight.exp_avg_sq_scale"].shape == (64, 2)
    assert states["optimizer.state.norm.weight.exp_avg"].shape == (64,)
    for run, ranks, layout in (("same", 2, []), ("tensor", 4, TENSOR), ("one", 1, [])):
        shutil.copytree(tmp_path / "half", tmp_path / run)
        argv = tiny_argv(tmp_path, *ARGV, *layout, run=run)
        found = run_ranks(loaded, ranks, argv)[0]
        assert found.keys() == states.keys()
        assert all(torch.equal(found[name], states[name]) for name in states), run
        resumed = run_ranks(run_job, ranks, argv)[0]
        assert resumed.steps == [1, 2, 3, 4, 5, 6]
        off = max(float((resumed.weights[name] - w).abs().max()) for name, w in through.weights.items())
        print(f"{run}: {off:.1e}")
        assert off == 0 if run == "same" else off < 2e-4
    # What four ranks have written, one reads.
    states = stored(tmp_path / "tensor" / "checkpoint" / "step-6")
    found = run_ranks(loaded, 1, tiny_argv(tmp_path, *ARGV, run="tensor"))[0]
    assert found.keys() == states.keys() and all(torch.equal(found[name], states[name]) for name in states)
    for word, message in (
        (
            "--optimizer.groups=[]",
            r"optimizer.groups: the checkpoint holds AdamWFp8's state of layers\.1\..* AdamW8bit's now",
        ),
        ("--optimizer.block_size=64", "optimizer.block_size: 64 is not what the checkpoint's states were kept with"),
    ):
        argv = tiny_argv(tmp_path, *ARGV, "--training.steps=8", word, run="one")
        with pytest.raises(RanksFailed, match=message):
            run_ranks(run_job, 1, argv)
