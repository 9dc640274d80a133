"""Gathering and scattering against what one process computes, values and gradients, along any dimension."""

import torch

from tests.launch import run_ranks
from torchtitan.distributed.collectives import all_gather, gather_dim, reduce_scatter, scatter_dim
from torchtitan.distributed.world import World


def differences(world: World) -> dict[str, float]:
    import torch.distributed as dist

    group, n = dist.group.WORLD, world.size
    assert group is not None
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape, dim in (((2, 3 * n, 5), 1), ((1, 2 * n, 4), 1), ((4 * n,), 0), ((2, 3, 2 * n), 2)):
            torch.manual_seed(0)
            everyones = [torch.randn(shape).to(dtype) for _ in range(n)]
            # Each rank's part of its own row, gathered: the gradient of a part is the sum over ranks.
            part = everyones[0].chunk(n, dim)[world.rank].clone().requires_grad_()
            gathered = gather_dim(part, dim, group)
            gathered.backward(everyones[world.rank])
            total = torch.stack(everyones).float().sum(0)
            key = f"{dtype} {shape}"
            found[f"{key} gather"] = error(gathered, everyones[0])
            assert part.grad is not None
            found[f"{key} gather, gradient"] = error(part.grad, total.chunk(n, dim)[world.rank])
            whole = everyones[world.rank].clone().requires_grad_()
            scattered = scatter_dim(whole, dim, group)
            scattered.backward(everyones[0].chunk(n, dim)[world.rank])
            assert whole.grad is not None
            found[f"{key} scatter"] = error(scattered, total.chunk(n, dim)[world.rank])
            found[f"{key} scatter, gradient"] = error(whole.grad, everyones[0])
    mine = torch.full((3, 2), float(world.rank)).t()
    assert all_gather(mine, group).shape == (n, 2, 3)
    assert torch.equal(reduce_scatter(torch.ones(n, 2, 3), group), torch.full((2, 3), float(n)))
    return found


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    scale = float(expected.float().norm())
    return float((got.float() - expected.float()).norm()) / scale


def test_values_and_gradients_are_those_of_one_process() -> None:
    for ranks in (2, 3):
        for found in run_ranks(differences, ranks):
            for case, value in found.items():
                assert value <= (1e-6 if "float32" in case else 4e-3), (case, value)
