"""What every registered model family promises, checked for each by its name alone."""

import dataclasses
import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.distributed.pipeline import prune
from torchtitan.distributed.stages import split_stages
from torchtitan.errors import ConfigError
from torchtitan.models.huggingface import (
    TensorTable,
    family_of,
    from_config,
    from_huggingface,
    to_config,
    to_huggingface,
)
from torchtitan.models.init import find_rule
from torchtitan.models.spec import MODELS, ModelSpec, roles_of

FAMILIES = MODELS.names()
WITH_TWIN = [name for name in FAMILIES if MODELS.get(name).huggingface is not None]


def small(spec: ModelSpec, **changes: Any) -> Any:
    """The smallest flavor of the family, cut to two layers."""
    flavor = min(spec.flavors.values(), key=lambda args: args.dim * args.n_layers)
    return dataclasses.replace(flavor, n_layers=2, **changes)


def build(spec: ModelSpec, args: Any) -> nn.Module:
    torch.manual_seed(0)
    model = spec.cls(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_flavor_builds_on_meta_and_has_a_rule_for_each_parameter(name: str) -> None:
    spec = MODELS.get(name)
    for flavor, args in spec.flavors.items():
        model = spec.build_meta(args)
        rules = spec.init(args)
        names = dict(model.named_parameters())
        assert all(p.is_meta for p in names.values()), flavor
        assert all(find_rule(rules, parameter) for parameter in names)
        assert not list(model.named_buffers()), "a buffer would be lost between meta and the device"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layout_holds_every_parameter_once(name: str) -> None:
    spec = MODELS.get(name)
    model = spec.build_meta(small(spec))
    layout = spec.layout
    modules = [
        *layout.stem,
        *(f"{layout.blocks}.{key}" for key, _ in model.get_submodule(layout.blocks).named_children()),
        *layout.head,
    ]
    held = [f"{module}.{p}" for module in modules for p, _ in model.get_submodule(module).named_parameters()]
    assert sorted(held) == sorted(dict(model.named_parameters(remove_duplicate=False)))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_module_with_parameters_has_a_role_and_every_pattern_a_module(name: str) -> None:
    spec = MODELS.get(name)
    model = spec.build_meta(small(spec))
    found = dict(roles_of(model, spec.roles))  # raises where a role is missing
    for pattern in spec.roles:
        assert any(fnmatch.fnmatchcase(module, pattern) for module in found), f"{pattern} matches no module"


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_together_hold_every_parameter_once(name: str) -> None:
    spec = MODELS.get(name)
    args = dataclasses.replace(small(spec, tie_word_embeddings=False), n_layers=5)
    names = [block for block, _ in spec.build_meta(args).get_submodule(spec.layout.blocks).named_children()]
    for number in (1, 2, 4, 5):
        held: list[str] = []
        for stage in split_stages(spec.layout, names, number, first=1, last=1):
            part = spec.build_meta(args)
            prune(part, spec.layout, stage)
            held += dict(part.named_parameters())
        assert sorted(held) == sorted(dict(spec.build_meta(args).named_parameters()))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_parallelism_divides_is_told(name: str) -> None:
    spec = MODELS.get(name)
    for args in (small(spec), *spec.flavors.values()):
        divisible = spec.divisible(args)
        assert divisible.heads % divisible.kv_heads == 0 and divisible.hidden > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_ties_are_told(name: str) -> None:
    spec = MODELS.get(name)
    for args in (small(spec), *spec.flavors.values()):
        model = spec.build_meta(args)
        unique, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
        told = spec.tied(args)
        assert set(every) - set(unique) == set(told)
        assert all(every[second] is every[first] for second, first in told.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_causality_and_gradients(name: str) -> None:
    spec = MODELS.get(name)
    args = small(spec)
    model = build(spec, args)
    tokens = torch.randint(args.vocab_size, (2, 12))
    positions = torch.arange(12).expand(2, -1)
    logits = model(tokens, positions)
    assert logits.shape == (2, 12, args.vocab_size)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % args.vocab_size
    torch.testing.assert_close(model(other, positions)[:, :-1], logits[:, :-1])
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORE_INDEX
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX).backward()
    for parameter, value in model.named_parameters():
        assert value.grad is not None and value.grad.abs().max() > 0, parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_operation_counts_follow_the_parameters(name: str) -> None:
    """Six operations per parameter and token, the embedding look-up apart, whatever the family."""
    spec = MODELS.get(name)
    for args in spec.flavors.values():
        model = spec.build_meta(args)
        embedding = sum(p.numel() for stem in spec.layout.stem for p in model.get_submodule(stem).parameters())
        every = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
        counted = spec.flops(args, 1024)
        assert counted.weights == 6 * (every - embedding)
        assert spec.flops(args, 2048).attention == 2 * counted.attention > 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WITH_TWIN)
def test_its_twin_holds_every_parameter_once_and_gives_it_back_to_the_bit(name: str, tied: bool) -> None:
    spec = MODELS.get(name)
    args = small(spec, tie_word_embeddings=tied)
    model = build(spec, args)
    table = TensorTable(spec, args)
    held = [part for stored in (table.stored | table.optional).values() for part in stored.parts]
    assert sorted(held) == sorted(dict(model.named_parameters(remove_duplicate=False)))
    state = {parameter: p.detach() for parameter, p in model.named_parameters()}
    theirs = to_huggingface(spec, args, model.state_dict())
    assert set(theirs) == set(table.stored) and all(t.is_contiguous() for t in theirs.values())
    ours = from_huggingface(spec, args, theirs)
    assert set(ours) == set(state) and all(torch.equal(ours[parameter], state[parameter]) for parameter in state)
    # A file may repeat a tied weight, but not with other numbers.
    for second, stored in table.optional.items():
        (first,) = (key for key, other in table.stored.items() if other.parts == (spec.tied(args)[stored.parts[0]],))
        assert set(from_huggingface(spec, args, theirs | {second: theirs[first].clone()})) == set(state)
        with pytest.raises(ConfigError, match="tie_word_embeddings"):
            from_huggingface(spec, args, theirs | {second: theirs[first] + 1})
    name, tensor = next(iter(theirs.items()))
    for changed, words in (({}, "is missing"), ({name: tensor[:-1]}, "has shape"), ({"what": tensor}, "what")):
        damaged = {key: value for key, value in theirs.items() if key != name} | changed
        with pytest.raises(ConfigError, match=words):
            from_huggingface(spec, args, damaged)


@pytest.mark.parametrize("name", WITH_TWIN)
def test_a_config_of_its_twin_says_all_that_builds_it(name: str) -> None:
    spec = MODELS.get(name)
    for flavor, args in spec.flavors.items():
        config = to_config(spec, args)
        assert family_of(config) == name
        again = from_config(spec, config)
        assert to_config(spec, again) == config, flavor
        shapes, same = ({key: p.shape for key, p in spec.build_meta(a).named_parameters()} for a in (args, again))
        assert shapes == same and spec.tied(args) == spec.tied(again), flavor


@pytest.mark.parametrize("name", WITH_TWIN)
def test_what_it_does_not_compute_is_refused_by_name_and_value(name: str) -> None:
    spec = MODELS.get(name)
    assert spec.huggingface is not None
    config = to_config(spec, small(spec))
    changes = {key: "another" for key in spec.huggingface.fixed}
    changes |= {"quantization_config": "fp8", "layer_types": ["sliding_attention"], "model_type": "another"}
    changes |= {"rope_parameters": {"rope_type": "yarn"}} if spec.huggingface.rotary else {}
    for key, value in changes.items():
        with pytest.raises(ConfigError) as refused:
            from_config(spec, config | {key: value})
        line = str(refused.value)
        assert (key if key != "rope_parameters" else "rope_type") in line and "\n" not in line
