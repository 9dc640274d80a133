"""The norm counts every element once, whoever holds it, and clipping scales all ranks alike."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from tests.launch import run_ranks
from torchtitan.distributed.gradients import clip_by_norm, global_norm
from torchtitan.distributed.world import World


def with_gradient(value: torch.Tensor, *placement: object) -> nn.Parameter:
    if placement:
        mesh = init_device_mesh("cpu", (2, 2))
        value = distribute_tensor(value, mesh, placement)
    parameter = nn.Parameter(torch.zeros_like(value))
    parameter.grad = value
    return parameter


def norms(world: World) -> tuple[float, float, list[float]]:
    torch.manual_seed(0)
    values = [torch.randn(5, 3), torch.randn(7), torch.randn(4, 4), torch.randn(3)]
    placements = [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    expected = torch.cat([v.flatten() for v in values]).norm().item()
    parameters = [with_gradient(v, *p) for v, p in zip(values, placements, strict=True)]
    norm = global_norm(parameters)
    clip_by_norm(parameters, norm, 0.5)
    clipped = [p.grad.full_tensor().norm().item() for p in parameters]  # type: ignore[union-attr]
    return norm.item(), expected, clipped


def test_the_norm_over_any_placement_is_that_of_the_whole() -> None:
    results = run_ranks(norms, 4)
    assert len({norm for norm, _, _ in results}) == 1, "ranks disagree"
    norm, expected, clipped = results[0]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert math.hypot(*clipped) == pytest.approx(0.5, rel=1e-4)


def test_zero_means_no_clipping_and_small_gradients_are_left_alone() -> None:
    for limit in (0.0, 100.0):
        parameter = with_gradient(torch.tensor([3.0, 4.0]))
        clip_by_norm([parameter], global_norm([parameter]), limit)
        assert parameter.grad.tolist() == [3.0, 4.0]  # type: ignore[union-attr]


def test_the_norm_of_large_parameters_is_exact_to_float32() -> None:
    torch.manual_seed(0)
    parameters = [with_gradient(torch.randn(4000, 1000) * 1e-3), with_gradient(torch.randn(30_000))]
    parameters.append(with_gradient(torch.zeros(0, 5)))
    expected = math.hypot(*(p.grad.double().norm().item() for p in parameters))  # type: ignore[union-attr]
    assert global_norm(parameters).item() == pytest.approx(expected, rel=5e-7)


def test_bf16_gradients_are_summed_in_float32() -> None:
    parameter = with_gradient(torch.full((1 << 16,), 0.01, dtype=torch.bfloat16))
    expected = 256 * torch.tensor(0.01, dtype=torch.bfloat16).item()
    assert global_norm([parameter]).item() == pytest.approx(expected, rel=1e-5)
