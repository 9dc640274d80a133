"""Muon on one process: torch's own to the bit where it computes alike, and what an update is made of."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.optim.groups import plan_optimizer
from torchtitan.optim.muon import orthogonalize

STANDARD: dict[str, Any] = {"steps": 5, "coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in [(8, 24), (24, 16), (16, 16)]))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 8)).square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (step + 1)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def muon(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return plan_optimizer("Muon", options, lr=0.02, weight_decay_exclude=[], groups=[]).build(net.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"weight_decay": 0.0, "ns_steps": 3, "eps": 1e-3},
        {"adjust_lr_fn": "match_rms_adamw"},
    ],
)
def test_with_bfloat16_iterations_it_is_torchs_to_the_bit(options: dict[str, Any]) -> None:
    net, other = model(), model()
    got = train(net, muon(net, orthogonalize_dtype="bfloat16", **options))
    expected = train(other, torch.optim.Muon(other.parameters(), lr=0.02, **options))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_in_float32_it_is_the_written_formula() -> None:
    """Iterations on the singular values alone, in float64: the polynomial maps each, and leaves the vectors."""
    net, other = model(), model()
    got = train(net, muon(net))
    momenta = [torch.zeros_like(p) for p in other.parameters()]
    torch.manual_seed(1)
    for step in range(4):
        other.zero_grad()
        other(torch.randn(5, 8)).square().sum().backward()
        for p, m in zip(other.parameters(), momenta, strict=True):
            assert p.grad is not None
            m.mul_(0.95).add_(p.grad, alpha=0.05)
            u, s, vh = torch.linalg.svd((0.05 * p.grad + 0.95 * m).double(), full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            lr = 0.02 * (step + 1)
            with torch.no_grad():
                update = (u * s @ vh).float() * lr * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                p.mul_(1 - lr * 0.1).sub_(update)
    for a, b in zip(got, other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_singular_values_come_near_one_and_the_input_stays() -> None:
    torch.manual_seed(0)
    for shape in [(20, 20), (40, 10), (10, 40)]:
        matrix = torch.randn(shape)
        before = matrix.clone()
        values = torch.linalg.svdvals(orthogonalize(matrix, dtype=torch.float32, **STANDARD))
        assert torch.equal(matrix, before)
        assert values.min() > 0.3 and values.max() < 1.3


def test_nothing_is_orthogonal_to_nothing() -> None:
    assert orthogonalize(torch.zeros(3, 4), dtype=torch.float32, **STANDARD).count_nonzero() == 0


def test_updates_are_as_large_as_asked() -> None:
    """A root mean square of about 0.2 times the rate, whatever the shape."""
    for rows, columns in [(64, 64), (128, 16), (16, 128)]:
        net = nn.Linear(columns, rows, bias=False)
        before = net.weight.detach().clone()
        optimizer = muon(net, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
        net.weight.grad = torch.randn(rows, columns)
        optimizer.step()
        assert (net.weight.detach() - before).square().mean().sqrt() == pytest.approx(0.2 * 0.02, rel=0.2)
