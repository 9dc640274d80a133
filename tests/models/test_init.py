"""The name-seeded draw: the same whoever asks for which part, and distributed as the rule says."""

from itertools import pairwise

import pytest
import torch

from torchtitan.models.init import Constant, Normal, draw, find_rule
from torchtitan.models.llama3 import FLAVORS
from torchtitan.models.spec import MODELS

NAME = "layers.0.attention.wq.weight"
UNIT = Normal(1.0)


def whole(shape: tuple[int, ...], seed: int = 0, name: str = NAME, rule: Normal | Constant = UNIT) -> torch.Tensor:
    return draw(name, shape, rule, seed, [0] * len(shape), shape)


@pytest.mark.parametrize("shape", [(7,), (101, 32), (1500, 700), (3, 5, 4), (2, 300_000)])
def test_any_box_is_cut_from_the_same_parameter(shape: tuple[int, ...]) -> None:
    full = whole(shape)
    for parts in (2, 3, 4):
        edges = [shape[0] * k // parts for k in range(parts + 1)]
        pieces = [
            draw(NAME, shape, Normal(1.0), 0, [a] + [0] * (len(shape) - 1), [b - a, *shape[1:]])
            for a, b in pairwise(edges)
        ]
        assert torch.equal(torch.cat(pieces), full)
    if len(shape) > 1:
        half = shape[1] // 2
        sizes = [shape[0], shape[1] - half, *shape[2:]]
        assert torch.equal(draw(NAME, shape, Normal(1.0), 0, [0, half] + [0] * (len(shape) - 2), sizes), full[:, half:])


def test_an_empty_box_and_a_scalar() -> None:
    assert draw(NAME, (3, 4), Normal(1.0), 0, [3, 0], [0, 4]).shape == (0, 4)
    assert whole((), rule=Constant(2.0)).item() == 2.0


def test_seed_and_name_change_the_draw() -> None:
    base = whole((64, 64))
    assert not torch.equal(base, whole((64, 64), seed=1))
    assert not torch.equal(base, whole((64, 64), name="layers.1.attention.wq.weight"))
    blocks = whole((2, 1 << 18))
    assert not torch.equal(blocks[0], blocks[1])


def test_distributions() -> None:
    plain, cut = whole((1000, 1000), rule=Normal(0.02)), whole((1000, 1000), rule=Normal(0.02, cut=3.0))
    for sample in (plain, cut):
        assert sample.mean().abs().item() < 1e-4
        assert sample.std().item() == pytest.approx(0.02, rel=0.02)
    assert cut.abs().max().item() <= 0.06 < plain.abs().max().item()


def test_rules_of_the_reference_recipe() -> None:
    rules = MODELS.get("llama3").init(FLAVORS["debugmodel"])
    assert find_rule(rules, "tok_embeddings.weight") == Normal(1.0)
    assert find_rule(rules, "output.weight") == Normal(1 / 16, cut=3.0)
    assert find_rule(rules, "layers.5.attention.wk.weight") == Normal(0.02)
    assert find_rule(rules, "layers.5.attention.wo.weight") == Normal(0.02 / 12**0.5)
    assert find_rule(rules, "layers.0.feed_forward.w3.weight") == Normal(0.02 / 2**0.5)
    assert find_rule(rules, "layers.2.ffn_norm.weight") == find_rule(rules, "norm.weight") == Constant(1.0)
    with pytest.raises(LookupError, match="nothing-like-it"):
        find_rule(rules, "nothing-like-it")
