"""What every registered part promises: documented options, and numbers that do not depend on how it is built."""

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.config.options import allowed
from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.loss.losses import LOSSES
from torchtitan.models.spec import MODELS
from torchtitan.optim.groups import plan_optimizer
from torchtitan.optim.optimizers import OPTIMIZERS
from torchtitan.optim.schedules import SCHEDULES

REGISTRIES = [
    "torchtitan.optim.optimizers:OPTIMIZERS",
    "torchtitan.optim.schedules:SCHEDULES",
    "torchtitan.loss.losses:LOSSES",
    "torchtitan.trainers:TRAINERS",
    "torchtitan.data.datasets:DATASETS",
    "torchtitan.data.tokenizer:TOKENIZERS",
    "torchtitan.observe.sinks:SINKS",
    "torchtitan.transforms:CONVERTERS",
]


@pytest.mark.parametrize("where", REGISTRIES)
def test_every_part_and_option_is_documented(where: str) -> None:
    module, name = where.split(":")
    registry = getattr(importlib.import_module(module), name)
    for part in registry.names():
        assert inspect.getdoc(registry.get(part)), f"{where} {part} has no docstring"
        for option in registry.options(part).values():
            assert option.doc, f"{where} {part}: {option.name} has no description"


def test_every_hyper_parameter_of_every_family_has_a_type_and_a_default() -> None:
    for name in MODELS.names():
        args_cls = MODELS.get(name).args_cls
        assert inspect.getdoc(args_cls)
        for field in dataclasses.fields(args_cls):
            assert field.default is not dataclasses.MISSING, f"{name}: {field.name}"


def train(name: str, options: dict[str, Any], steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = plan_optimizer(name, options, lr=1e-3, weight_decay_exclude=["*bias"], groups=[])
    optimizer = plan.build(model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_kernels_of_an_optimizer_agree(name: str) -> None:
    if "implementation" not in OPTIMIZERS.options(name):
        return
    plain = train(name, {"implementation": "for-loop"})
    for other in allowed(OPTIMIZERS.options(name)["implementation"].annotation):
        torch.testing.assert_close(train(name, {"implementation": other}), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_optimizers_go_downhill_and_keep_tensors(name: str) -> None:
    """On the parameters they take; what they keep is what a checkpoint can hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    takes = getattr(OPTIMIZERS.get(name), "takes", None)
    taken = [(n, p) for n, p in model.named_parameters() if takes is None or takes.fits(p.shape)]
    optimizer = plan_optimizer(name, {}, lr=1e-2, weight_decay_exclude=[], groups=[]).build(taken)
    data, losses = torch.randn(32, 8), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize(("name", "cls"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)])
def test_options_reach_the_optimizer(name: str, cls: type[torch.optim.Optimizer]) -> None:
    options = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3, "implementation": "foreach"}
    model = nn.Linear(3, 2)
    plan = plan_optimizer(name, options, lr=0.5, weight_decay_exclude=["bias"], groups=[])
    optimizer = plan.build(model.named_parameters())
    assert type(optimizer) is cls
    weight, bias = optimizer.param_groups
    assert (weight["lr"], weight["betas"], weight["eps"], weight["weight_decay"]) == (0.5, (0.8, 0.9), 1e-6, 0.3)
    assert weight["foreach"] is True and not weight["fused"]
    assert bias["params"] == [model.bias] and bias["weight_decay"] == 0.0 and bias["lr"] == 0.5


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_schedules_stay_between_nothing_and_the_peak(name: str) -> None:
    for total in (1, 2, 7, 1000):
        factors = [SCHEDULES.bind(name, {}, key="lr_scheduler")(total)(step) for step in range(1, total + 1)]
        assert all(0 <= factor <= 1 for factor in factors) and max(factors) > 0


@pytest.mark.parametrize("name", LOSSES.names())
def test_losses_are_sums_that_ignore_what_is_marked(name: str) -> None:
    loss = LOSSES.bind(name, {}, key="loss")()
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    labels[0, 3:] = IGNORE_INDEX
    whole = loss(logits, labels)
    parts = sum(loss(logits[b : b + 1, t : t + 1], labels[b : b + 1, t : t + 1]) for b in range(2) for t in range(5))
    torch.testing.assert_close(whole, parts)
    assert loss(logits[:1, 3:], labels[:1, 3:]) == 0
    assert loss(logits.bfloat16(), labels).dtype == torch.float32
