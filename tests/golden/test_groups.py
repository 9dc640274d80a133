"""Groups of parameters against a loop written by hand over torch's own optimizers, to the bit, and across a resume."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.launch import RanksFailed, run_ranks
from tests.runs import run_job, run_jobs, tiny_argv, whole_parameters
from torchtitan.config import load_config
from torchtitan.distributed.gradients import clip_by_norm, global_norm
from torchtitan.distributed.world import World
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

GROUPS = """[
    {pattern = "tok_embeddings.weight", lr = 5e-3, weight_decay = 0.3},
    {pattern = ["layers.*.attention.w[qk].weight"], name = "SGD", lr = 0.1, momentum = 0.8, weight_decay = 0.01},
    {pattern = "output.weight", beta1 = 0.5},
]""".replace("\n", " ")
ARGV = [
    f"--optimizer.groups={GROUPS}",
    "--optimizer.weight_decay_exclude=*norm.weight,output.weight",
    "--training.steps=6",
    "--lr_scheduler.total_steps=8",
    "--checkpoint.enable",
]


def by_hand(world: World, argv: list[str]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after six steps, and the rates of ``[optimizer]``."""
    trainer = Trainer(resolve_job(load_config(argv), 1), world)
    named = dict(trainer.runner.named_parameters)
    embedding, head = named.pop("tok_embeddings.weight"), named.pop("output.weight")
    queries = [named.pop(f"layers.{i}.attention.w{w}.weight") for i in range(2) for w in "qk"]
    norms = [named.pop(name) for name in list(named) if name.endswith("norm.weight")]
    rest = list(named.values())
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [embedding], "lr": 5e-3, "weight_decay": 0.3},
                {"params": rest, "lr": 1e-3, "weight_decay": 0.1},
                {"params": norms, "lr": 1e-3, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        ),
        torch.optim.AdamW([head], lr=1e-3, betas=(0.5, 0.95), weight_decay=0.0, fused=True),
        torch.optim.SGD(queries, lr=0.1, momentum=0.8, weight_decay=0.01, foreach=True),
    ]
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    rates = []
    parameters = [p for _, p in trainer.runner.named_parameters]
    for step, batches in zip(range(1, 7), trainer.loader, strict=False):
        trainer.runner.forward_backward(batches, sum(batch.num_valid() for batch in batches))
        clip_by_norm(parameters, global_norm(parameters), 1.0)
        factor = step / 2 if step <= 2 else 1.0 if step == 3 else 1 - (step - 3) / 6  # two of eight steps warm up
        for optimizer, own in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        rates.append(1e-3 * factor)
    trainer.close()
    return whole_parameters({name: p.detach() for name, p in trainer.runner.named_parameters}, world), rates


def test_groups_are_the_loop_by_hand_and_go_on_to_the_bit(tmp_path: Path) -> None:
    argv = tiny_argv(tmp_path, *ARGV)
    ((expected, rates),) = run_ranks(by_hand, 1, tiny_argv(tmp_path, *ARGV, "--checkpoint.no_enable", run="hand"))
    through = run_ranks(run_job, 1, argv)[0]
    shutil.rmtree(tmp_path / "run")
    run_ranks(run_job, 1, [*argv, "--training.steps=3"])
    resumed = run_ranks(run_job, 1, argv)[0]
    assert resumed.steps == [1, 2, 3, 4, 5, 6]
    for outcome in (through, resumed):
        assert outcome.rates == rates
        for name, weight in expected.items():
            assert torch.equal(outcome.weights[name], weight), name


MUON = [
    '--optimizer.groups=[{pattern = "layers.*.w*.weight", name = "Muon", lr = 0.02}]',
    "--optimizer.weight_decay_exclude=*norm.weight",
    "--training.steps=6",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--lr_scheduler.total_steps=8",
]


def test_muon_beside_adamw_goes_on_in_any_layout(tmp_path: Path) -> None:
    through, half = run_ranks(
        run_jobs, 2, [tiny_argv(tmp_path, *MUON), tiny_argv(tmp_path, *MUON, "--training.steps=3", run="half")]
    )[0]
    assert half.losses == through.losses[:3]
    metadata = dcp.FileSystemReader(tmp_path / "half" / "checkpoint" / "step-3").read_metadata()
    states = metadata.state_dict_metadata
    momentum = states["optimizer.state.layers.0.attention.wq.weight.momentum_buffer"]
    assert len(momentum.chunks) == 2  # spread like the parameter
    assert "optimizer.state.norm.weight.exp_avg" in states
    for run, ranks, layout in (
        ("same", 2, []),
        ("tensor", 2, ["--parallelism.tensor_parallel_degree=2"]),
        ("one", 1, []),
    ):
        shutil.copytree(tmp_path / "half", tmp_path / run)
        resumed = run_ranks(run_job, ranks, tiny_argv(tmp_path, *MUON, *layout, run=run))[0]
        assert resumed.steps == [1, 2, 3, 4, 5, 6]
        off = max(float((resumed.weights[name] - w).abs().max()) for name, w in through.weights.items())
        print(f"{run}: {off:.1e}")
        assert off == 0 if run == "same" else off < 1e-5
    with pytest.raises(RanksFailed, match=r"optimizer.groups: the checkpoint holds Muon's state of layers\.0\."):
        run_ranks(run_job, 1, tiny_argv(tmp_path, *MUON, "--optimizer.groups=[]", run="one"))
