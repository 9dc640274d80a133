"""Which parameters go to which optimizer, and what of that is refused before a run."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.models.llama3 import Llama3, Llama3Args
from torchtitan.optim.groups import OptimizerPlan, Together, check_plan, plan_optimizer
from torchtitan.optim.optimizers import OPTIMIZERS, Groups
from torchtitan.state import OptimizerFacts

MODEL = Llama3(Llama3Args(dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=16))
NAMES = [name for name, _ in MODEL.named_parameters()]
SHAPES = {name: parameter.shape for name, parameter in MODEL.named_parameters()}


def plan(*groups: Mapping[str, Any], exclude: tuple[str, ...] = (), **options: Any) -> OptimizerPlan:
    return plan_optimizer("AdamW", options, lr=0.1, weight_decay_exclude=exclude, groups=groups)


def names_of(group: Mapping[str, Any]) -> set[str]:
    return {name for name, p in MODEL.named_parameters() if any(p is q for q in group["params"])}


def test_one_group_without_exclusions() -> None:
    optimizer = plan().build(MODEL.named_parameters())
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert names_of(group) == set(NAMES)
    assert group["lr"] == 0.1 and group["weight_decay"] == 0.1


def test_patterns_take_parameters_out_of_the_decay() -> None:
    decayed, excluded = plan(exclude=("*norm.weight", "tok_*")).build(MODEL.named_parameters()).param_groups
    assert names_of(excluded) == {name for name in NAMES if "norm" in name or name.startswith("tok_")}
    assert names_of(decayed) | names_of(excluded) == set(NAMES)
    assert not names_of(decayed) & names_of(excluded)
    assert excluded["weight_decay"] == 0.0 and excluded["lr"] == 0.1


def test_everything_may_be_excluded() -> None:
    (group,) = plan(exclude=("*",)).build(MODEL.named_parameters()).param_groups
    assert group["weight_decay"] == 0.0


def test_the_first_group_that_matches_takes_a_parameter() -> None:
    planned = plan({"pattern": "*.wq.weight", "lr": 1.0}, {"pattern": ["*.w*.weight", "norm.weight"], "lr": 2.0})
    rates = {name: planned.group_of(name).lr for name in NAMES}
    for name, rate in rates.items():
        second = ".w" in name.removesuffix(".weight") or name == "norm.weight"
        assert rate == (1.0 if ".wq." in name else 2.0 if second else 0.1), name


def test_rates_and_decays_share_an_optimizer_and_other_options_do_not() -> None:
    groups = (
        {"pattern": "tok_*", "lr": 1.0},
        {"pattern": "output*", "weight_decay": 0.5},
        {"pattern": "*.wq.weight", "beta1": 0.5},
        {"pattern": "*.wk.weight", "beta1": 0.9},  # what [optimizer] has
        {"pattern": "*.wv.weight", "name": "SGD", "lr": 3.0},
    )
    optimizer = plan(*groups, exclude=("output*", "norm*"), beta2=0.7).build(MODEL.named_parameters())
    assert isinstance(optimizer, Together)
    adam, other, sgd = optimizer.optimizers
    assert [type(o).__name__ for o in optimizer.optimizers] == ["AdamW", "AdamW", "SGD"]
    settings = [(names_of(g), g["lr"], g["weight_decay"]) for g in adam.param_groups]
    assert settings[:3] == [
        ({"tok_embeddings.weight"}, 1.0, 0.1),
        ({"output.weight"}, 0.1, 0.5),  # its own decay, although it is excluded from that of [optimizer]
        ({"layers.0.attention.wk.weight", "layers.1.attention.wk.weight"}, 0.1, 0.1),
    ]
    assert settings[4] == ({"norm.weight"}, 0.1, 0.0)
    assert {g["betas"] for g in adam.param_groups} == {(0.9, 0.7)}
    assert {g["betas"] for g in other.param_groups} == {(0.5, 0.7)}  # what it leaves out is that of [optimizer]
    assert (sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]) == (3.0, 0.9)  # its default


def test_several_are_run_as_one() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = [{"pattern": "0.*", "name": "SGD"}]
    optimizer = plan_optimizer("AdamW", {}, lr=0.1, weight_decay_exclude=[], groups=groups).build(
        model.named_parameters()
    )
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.0  # reaches the optimizer that has the group
    optimizer.step()
    unchanged = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert unchanged == [True, True, False, False]
    assert {key for state in optimizer.state.values() for key in state} == {
        *("momentum_buffer", "step", "exp_avg", "exp_avg_sq")
    }
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.full((3, 4), 7.0)  # as a checkpoint puts it
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert (before[0] - model[0].weight).min() > 5


def test_a_part_of_the_model_may_hold_none_of_a_groups_parameters() -> None:
    named = [(name, p) for name, p in MODEL.named_parameters() if name.startswith("layers.1")]
    assert type(plan({"pattern": "tok_*", "name": "SGD"}).build(named)) is torch.optim.AdamW
    assert type(plan({"pattern": "layers.*", "name": "SGD"}).build(named)) is torch.optim.SGD


@pytest.mark.parametrize(
    ("planned", "key", "problem"),
    [
        (
            plan(exclude=("*norm.weight", "*.bias")),
            "optimizer.weight_decay_exclude",
            r"no parameter matches '\*\.bias'",
        ),
        (plan({"pattern": "norm"}), "optimizer.groups[0].pattern", "no parameter matches 'norm'"),
        (
            plan({"pattern": "*.w?.weight"}, {"pattern": ["norm.weight", "*.wq.weight"]}),
            "optimizer.groups[1].pattern",
            r"all that '\*\.wq\.weight' matches, .* belongs to optimizer\.groups\[0\] before it",
        ),
        (
            plan({"pattern": "norm.weight", "name": "SGD", "nesterov": True, "momentum": 0.0}),
            "optimizer.groups[0].name",
            "SGD cannot be built: Nesterov",
        ),
        (
            plan_optimizer("Muon", {}, lr=0.1, weight_decay_exclude=[], groups=[]),
            "optimizer.name",
            r"Muon updates matrices only, and layers\.0\.attention_norm\.weight has the shape \[32\]; .*AdamW",
        ),
        (
            plan({"pattern": "layers.*", "name": "Muon"}),
            "optimizer.groups[0].pattern",
            r"Muon updates matrices only, .* narrow it, as layers\.\*\.w\*\.weight does",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(planned: OptimizerPlan, key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        check_plan(planned, SHAPES)
    assert refused.value.key == key


def test_what_can_be_meant_is_not() -> None:
    check_plan(plan({"pattern": "*"}), SHAPES)
    check_plan(plan({"pattern": "layers.*.w*.weight", "name": "Muon"}), SHAPES)  # what the remedy says
    matrices = plan_optimizer(
        "Muon", {}, lr=0.1, weight_decay_exclude=[], groups=[{"pattern": "*norm.weight", "name": "AdamW"}]
    )
    check_plan(matrices, SHAPES)
    check_plan(plan({"pattern": "*.wq.weight"}, {"pattern": "*.w?.weight", "name": "SGD"}, exclude=("*",)), SHAPES)


def test_states_of_another_optimizer_are_noticed() -> None:
    def facts(*groups: Mapping[str, Any]) -> OptimizerFacts:
        return OptimizerFacts("AdamW", plan(*groups).optimizers(NAMES))

    grouped = facts({"pattern": "norm.weight", "name": "SGD"}, {"pattern": "*.wq.weight", "lr": 2.0})
    assert grouped.state_dict() == {"name": "AdamW", "others": {"norm.weight": "SGD"}}
    grouped.load_state_dict(grouped.state_dict())
    facts().load_state_dict({"name": "AdamW"})  # as older checkpoints have it
    facts({"pattern": "*", "name": "SGD"}).load_state_dict({"name": "SGD"})
    message = "holds AdamW's state of norm.weight, which is SGD's now; .*exclude_from_loading"
    for ours, theirs, key, problem in (
        (grouped, {"name": "AdamW"}, "optimizer.groups", message),
        (facts(), grouped.state_dict(), "optimizer.groups", "holds SGD's state of norm.weight, which is AdamW's now"),
        (facts(), {"name": "SGD"}, "optimizer.name", "holds the states of SGD; .*exclude_from_loading"),
    ):
        with pytest.raises(ConfigError, match=problem) as refused:
            ours.load_state_dict(theirs)
        assert refused.value.key == key


class Counting(torch.optim.Optimizer):
    """Keeps what no checkpoint can hold."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["times"] = self.state[parameter].get("times", 0) + 1


def test_a_state_that_cannot_be_saved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS._items, "Counting", Counting)
    with pytest.raises(ConfigError) as caught:
        check_plan(plan({"pattern": "*norm.weight", "name": "Counting"}), SHAPES)
    assert caught.value.key == "optimizer.groups[0].name"
    assert "Counting keeps 'times' of a parameter as int; only tensors can be saved" in caught.value.problem


def test_what_is_no_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(groups: Groups) -> None:
        """Builds none."""

    monkeypatch.setitem(OPTIMIZERS._items, "nothing", nothing)
    with pytest.raises(ConfigError, match="nothing cannot be built: what builds it must return"):
        check_plan(plan({"pattern": "*norm.weight", "name": "nothing"}), SHAPES)


def test_the_second_name_of_a_tied_parameter_is_told() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "output.weight"}
    with pytest.raises(ConfigError, match=r"output\.weight is tied to tok_embeddings\.weight; name that"):
        check_plan(plan({"pattern": "output.weight"}), shapes, {"output.weight": "tok_embeddings.weight"})


def test_an_optimizer_without_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_plan(plan({"pattern": "*", "name": "SGD"}), SHAPES)
    assert "[optimizer] itself updates none" in caplog.text
