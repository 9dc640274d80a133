"""Dtypes are those of the policy in every layout, and a rank holds its part of the weights only."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.runs import tiny_argv
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

LAYOUTS = {1: [[]], 4: [[], ["--parallelism.data_parallel_replicate_degree=2"]]}
POLICIES = {
    "mixed": [],
    "fp32": ["--training.mixed_precision_param=float32"],
    "bf16": ["--training.dtype=bfloat16", "--training.mixed_precision_reduce=bfloat16"],
}


def dtypes_seen(world: World, argv: list[str]) -> dict[str, Any]:
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    (model,) = trainer.runner.parts
    seen: dict[str, Any] = {}
    block = model.layers["1"]
    block.register_forward_pre_hook(lambda _, inputs: seen.update(activation=inputs[0].dtype, cos=inputs[1].dtype))
    block.attention.wq.register_forward_hook(
        lambda module, _, out: seen.update(weight=module.weight.dtype, product=out.dtype, full=module.weight.shape)
    )
    trainer.train_step(next(iter(trainer.loader)), 100.0)
    parameter = dict(trainer.runner.named_parameters)["layers.1.attention.wq.weight"]
    seen.update(
        storage=parameter.dtype,
        gradient=parameter.grad.dtype,
        moment=trainer.optimizer.state[parameter]["exp_avg"].dtype,
        rows=parameter.to_local().shape[0],
        finite=all(p.to_local().isfinite().all() for p in trainer.parameters),
    )
    trainer.close()
    return seen


def all_dtypes(world: World, folder: Path) -> dict[str, list[dict[str, Any]]]:
    base = [a for a in tiny_argv(folder) if "mixed_precision" not in a]
    return {
        name: [dtypes_seen(world, [*base, *policy, *layout]) for layout in LAYOUTS[world.size]]
        for name, policy in POLICIES.items()
    }


@pytest.mark.parametrize("ranks", [1, 4])
def test_dtypes_follow_the_policy_in_every_layout(tmp_path: Path, ranks: int) -> None:
    storage = {"mixed": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
    compute = {"mixed": torch.bfloat16, "fp32": torch.float32, "bf16": torch.bfloat16}
    for by_policy in run_ranks(all_dtypes, ranks, tmp_path):
        for name, runs in by_policy.items():
            for layout, seen in zip(LAYOUTS[ranks], runs, strict=True):
                assert seen["activation"] == seen["weight"] == seen["product"] == compute[name], (name, layout)
                assert seen["cos"] == torch.float32
                assert seen["storage"] == seen["gradient"] == seen["moment"] == storage[name]
                assert seen["full"] == (32, 32)
                assert seen["rows"] == 32 // ranks * (2 if layout else 1)
                assert seen["finite"]
