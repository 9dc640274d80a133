"""Llama 3 against numbers that TorchTitan 0.2.2 produced: forward, gradients, ten steps of training, learning rates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import run_ranks
from torchtitan.config import ConfigError, load_config
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.fsdp import Precision
from torchtitan.distributed.gradients import clip_by_norm, global_norm
from torchtitan.distributed.parallelize import parallelize
from torchtitan.distributed.spread import Spread
from torchtitan.distributed.topology import Degrees, build_topology
from torchtitan.distributed.world import World
from torchtitan.loss.losses import LOSSES
from torchtitan.models.layers import RopeScaling, rope_frequencies
from torchtitan.models.llama3 import Llama3, Llama3Args
from torchtitan.models.spec import MODELS
from torchtitan.optim.groups import plan_optimizer
from torchtitan.optim.schedules import SCHEDULES

SCALING = {"off": RopeScaling(scaling_factor=1.0), "on": RopeScaling()}
CASES = ["init_off", "init_on", "wide_off", "wide_on"]


def args_of(case: str) -> Llama3Args:
    return Llama3Args(
        dim=64,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=512,
        multiple_of=32,
        rope_scaling_args=SCALING[case.split("_")[1]],
    )


@pytest.fixture(scope="module")
def golden(shared: Path) -> Path:
    return shared / "compat" / "titan022_golden"


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(golden: Path, case: str) -> None:
    expected = json.loads((golden / "forward.json").read_text())["cases"][case]
    model = Llama3(args_of(case))
    model.load_state_dict(load_file(golden / f"weights_{case.split('_')[0]}.safetensors"))
    tokens = load_file(golden / "tokens.safetensors")["tokens"]
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs, torch.arange(128).expand(4, -1))
    torch.testing.assert_close(logits[0, 124:128], load_file(golden / "logits.safetensors")[case], atol=1e-5, rtol=0.0)
    loss_sum = LOSSES.bind("cross_entropy", {}, key="loss")()(logits, labels)
    assert loss_sum.item() == pytest.approx(expected["loss_sum"], rel=1e-6)
    (loss_sum / expected["valid_tokens"]).backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(expected["param_grad_norms"], rel=1e-5)
    assert global_norm(list(model.parameters())).item() == pytest.approx(expected["total_grad_norm"], rel=1e-5)


def trajectory(
    world: World, folder: Path, case: str, labels_key: str | None, accumulation: int
) -> list[dict[str, float]]:
    """Ten steps of the platform's own parts on the peer's weights and batches, FSDP over the ranks of ``world``."""
    spec, args = MODELS.get("llama3"), args_of(case)
    topology = build_topology(Degrees().resolve(world.size), world)
    runner = parallelize(
        spec,
        args,
        topology,
        Spread(topology.degrees),
        loss=LOSSES.bind("cross_entropy", {}, key="loss")(),
        converters=[],
        device=world.device,
        seed=0,
        precision=Precision(param=torch.float32),
        cpu_offload=False,
    )
    (model,) = runner.parts
    put_weights(model, load_file(folder / f"weights_{case.split('_')[0]}.safetensors"))
    plan = plan_optimizer("AdamW", {"implementation": "for-loop"}, lr=1e-3, weight_decay_exclude=[], groups=[])
    optimizer = plan.build(model.named_parameters())
    schedule = SCHEDULES.bind("warmup_stable_decay", {"warmup_steps": 2}, key="lr_scheduler")(10)
    files = load_file(folder / "batches.safetensors")
    steps = []
    for step in range(1, 11):
        rows = files["batches"][step - 1]
        labels = rows[:, 1:] if labels_key is None else files[labels_key][step - 1]
        valid = int((labels != IGNORE_INDEX).sum())
        own = slice(world.rank * len(rows) // world.size, (world.rank + 1) * len(rows) // world.size)
        positions = torch.arange(128).expand(len(rows), -1)
        micro_batches = zip(*(t[own].chunk(accumulation) for t in (rows[:, :-1], labels, positions)), strict=True)
        loss = runner.forward_backward([Batch(*parts) for parts in micro_batches], valid).item()
        norm = global_norm(list(model.parameters()))
        clip_by_norm(model.parameters(), norm, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": world.sum([loss])[0], "grad_norm": norm.item(), "lr": group["lr"], "valid_tokens": valid})
    return steps


def put_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))


@pytest.mark.parametrize("ranks", [1, 2])
def test_trajectories(golden: Path, ranks: int) -> None:
    runs: dict[str, tuple[Any, ...]] = {case: (case, None, 1) for case in CASES}
    runs["wide_on_masked_ga1"] = ("wide_on", "labels_masked", 1)
    runs["wide_on_masked_ga2"] = ("wide_on", "labels_masked", 2)
    expected = json.loads((golden / "trajectory.json").read_text())["trajectories"]
    assert set(runs) == set(expected)
    for got in run_ranks(all_trajectories, ranks, golden, runs):
        for name, steps in got.items():
            for step, peer in zip(steps, expected[name]["steps"], strict=True):
                assert step["loss"] == pytest.approx(peer["loss"], abs=1e-5), (name, peer["step"])
                assert step["grad_norm"] == pytest.approx(peer["grad_norm"], abs=1e-5), (name, peer["step"])
                assert step["lr"] == pytest.approx(peer["lr"], rel=1e-12)
                assert step["valid_tokens"] == peer["valid_tokens"]


def all_trajectories(world: World, folder: Path, runs: dict[str, tuple[Any, ...]]) -> dict[str, list[dict[str, float]]]:
    return {name: trajectory(world, folder, *run) for name, run in runs.items()}


def test_learning_rates(golden: Path) -> None:
    cases = json.loads((golden / "lr_schedules.json").read_text())["cases"]
    assert len(cases) == 12
    for case in cases:
        options = dict(case["lr_scheduler"])
        total = options.pop("total_steps", case["training_steps"])
        schedule = SCHEDULES.bind("warmup_stable_decay", options, key="lr_scheduler")(total)
        rates = [case["lr"] * schedule(step) for step in range(1, case["training_steps"] + 1)]
        assert rates == pytest.approx(case["lr_used_at_step_1_to_n"], rel=1e-12), case


def test_a_schedule_shorter_than_the_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler\.total_steps"):
        load_config(["--training.steps", "10", "--lr_scheduler.total_steps", "5"])


def test_rope_frequencies(golden: Path) -> None:
    tables = json.loads((golden / "rope_frequencies.json").read_text())["tables"]
    assert len(tables) == 6
    for name, expected in tables.items():
        scaling, head = name.split("_headdim")
        assert rope_frequencies(int(head), 500000.0, SCALING[scaling]).tolist() == pytest.approx(expected, rel=1e-6)
