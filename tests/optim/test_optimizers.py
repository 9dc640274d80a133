"""Parameter groups by name."""

import pytest
from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.models.llama3 import Llama3, Llama3Args
from torchtitan.optim.optimizers import check_patterns, parameter_groups

MODEL = Llama3(Llama3Args(dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=16))


def names_of(group: dict[str, list[nn.Parameter]]) -> set[str]:
    return {name for name, p in MODEL.named_parameters() if any(p is q for q in group["params"])}


def test_one_group_without_exclusions() -> None:
    (group,) = parameter_groups(MODEL.named_parameters(), lr=0.1, weight_decay_exclude=[])
    assert names_of(group) == set(dict(MODEL.named_parameters()))
    assert group["lr"] == 0.1 and "weight_decay" not in group


def test_patterns_take_parameters_out_of_the_decay() -> None:
    decayed, excluded = parameter_groups(
        MODEL.named_parameters(), lr=0.1, weight_decay_exclude=["*norm.weight", "tok_*"]
    )
    assert names_of(excluded) == {n for n, _ in MODEL.named_parameters() if "norm" in n or n.startswith("tok_")}
    assert names_of(decayed) | names_of(excluded) == set(dict(MODEL.named_parameters()))
    assert not names_of(decayed) & names_of(excluded)
    assert excluded["weight_decay"] == 0.0 and excluded["lr"] == 0.1


def test_everything_may_be_excluded() -> None:
    (group,) = parameter_groups(MODEL.named_parameters(), lr=0.1, weight_decay_exclude=["*"])
    assert group["weight_decay"] == 0.0


def test_a_pattern_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"no parameter matches '\*\.bias'") as refused:
        check_patterns([name for name, _ in MODEL.named_parameters()], ["*norm.weight", "*.bias"])
    assert refused.value.key == "optimizer.weight_decay_exclude"
