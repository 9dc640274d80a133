"""The losses against torch's own operations, values and gradients, whole and over parts of a vocabulary."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.launch import run_ranks
from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.distributed.collectives import max_alike, sum_alike
from torchtitan.distributed.world import World
from torchtitan.loss.losses import LOSSES, Loss, VocabularyPart

IDS = 11
CASES = {
    "cross_entropy": {},
    "label_smoothing": {"smoothing": 0.3},
    "z_loss": {"z_weight": 0.05, "smoothing": 0.2},
}


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(IDS, (2, 5))
    labels[0, 3:] = IGNORE_INDEX
    return torch.randn(2, 5, IDS) * 4, labels


def expected(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0, z_weight: float = 0.0) -> Tensor:
    entropy = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX, label_smoothing=smoothing
    )
    return entropy + z_weight * logits.logsumexp(-1).square()[labels != IGNORE_INDEX].sum()


def build(name: str) -> Loss:
    return LOSSES.bind(name, CASES[name], key="loss")()


def with_gradient(loss: Any, logits: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    value = loss(logits, labels, **more)
    (3 * value).backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    logits, labels = data()
    got, grad = with_gradient(build(name), logits.to(dtype), labels)
    value, wanted = with_gradient(lambda x, y: expected(x.float(), y, **CASES[name]), logits.to(dtype), labels)
    torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-6)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_logits_far_from_zero_overflow_nothing(name: str) -> None:
    logits, labels = data()
    for offset in (1e4, -1e4):
        value, grad = with_gradient(build(name), logits * 20 + offset, labels)
        assert value.isfinite() and grad.isfinite().all()


def test_every_registered_loss_of_ours_is_in_these_tests() -> None:
    assert {n for n in LOSSES.names() if LOSSES.get(n).__module__.startswith("torchtitan.")} == set(CASES)


def by_hand(logits: Tensor, labels: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """The squared logarithm of the softmax's denominator, by what a part offers and torch's own gradients."""
    assert part is not None
    highest = part.max(logits.amax(-1))
    total = part.sum((logits - highest.unsqueeze(-1)).exp().sum(-1))
    return (highest + total.log()).square()[labels != IGNORE_INDEX].sum()


def over_parts(world: World) -> dict[str, float]:
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    logits, labels = data()
    each = -(-IDS // world.size)
    first = world.rank * each
    mine = slice(first, min(first + each, IDS))
    part = VocabularyPart(first, IDS, sum=lambda x: sum_alike(x, group), max=lambda x: max_alike(x, group))
    losses: dict[str, tuple[Loss, dict[str, float]]] = {name: (build(name), options) for name, options in CASES.items()}
    found = {}
    for name, (loss, options) in losses.items():
        value, wanted = with_gradient(lambda x, y: expected(x, y, **options), logits, labels)  # noqa: B023
        got, grad = with_gradient(loss, logits[..., mine], labels, part=part)
        found[name] = float((got / value - 1).abs())
        found[f"{name}, gradient"] = float((grad - wanted[..., mine]).norm() / wanted.norm())
    value, wanted = with_gradient(lambda x, y: expected(x, y, z_weight=1.0) - expected(x, y), logits, labels)
    got, grad = with_gradient(by_hand, logits[..., mine], labels, part=part)
    found["by hand"] = float((got / value - 1).abs())
    found["by hand, gradient"] = float((grad - wanted[..., mine]).norm() / wanted.norm())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_a_vocabulary_give_what_the_whole_gives(ranks: int) -> None:
    for found in run_ranks(over_parts, ranks):
        assert {name: value for name, value in found.items() if value > 1e-6} == {}
