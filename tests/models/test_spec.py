"""What a family can be told from outside its file, and what of what it tells is checked."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs import tiny_argv
from torchtitan.config import load_config
from torchtitan.errors import ConfigError
from torchtitan.models.init import Constant
from torchtitan.models.spec import MODELS
from torchtitan.resolve.job import resolve_job


def test_a_flavor_from_outside() -> None:
    llama3 = MODELS.get("llama3")
    spec = dataclasses.replace(llama3, flavors=dict(llama3.flavors))
    small = dataclasses.replace(spec.flavors["debugmodel"], n_layers=1)
    spec.add_flavor("small", small)
    assert spec.flavors["small"] is small
    with pytest.raises(ValueError, match="'small' is taken"):
        spec.add_flavor("small", small)
    with pytest.raises(ValueError, match="must be Llama3Args, not dict"):
        spec.add_flavor("smaller", {})


class Drawing(nn.Module):
    """A model that draws its weights itself, in the ways that there are."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.dim)
        self.linear = nn.Linear(args.dim, 3)
        nn.init.trunc_normal_(tensor=self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)
        self.gate = nn.Parameter(torch.empty(args.dim).normal_().mul_(2).unsqueeze_(0))


def test_shapes_are_told_without_drawing_what_is_drawn_by_name_later() -> None:
    """Of which torch would import its compiler (tests/architecture)."""
    llama3 = MODELS.get("llama3")
    before = torch.get_rng_state()
    model = dataclasses.replace(llama3, cls=Drawing).build_meta(llama3.flavors["debugmodel"])
    assert torch.equal(torch.get_rng_state(), before)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_meta and p.requires_grad}
    dim, vocab = llama3.flavors["debugmodel"].dim, llama3.flavors["debugmodel"].vocab_size
    assert shapes == {
        "gate": (1, dim),
        "embedding.weight": (vocab, dim),
        "linear.weight": (3, dim),
        "linear.bias": (3,),
    }


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"layout": {"stem": ("tok",)}}, "layout.stem names 'tok', and the model has no such module"),
        (
            {"layout": {"attention": "attention.inner"}},
            "layout.attention names 'attention.inner', and block '0'",
        ),
        (
            {"init": lambda args: {"norm.weight": Constant(1.0)}},
            "no init rule matches parameter 'tok_embeddings",
        ),
        ({"roles": {"norm": "norm"}}, "no role matches module 'tok_embeddings'"),
    ],
)
def test_tables_that_do_not_fit_the_model_are_told_before_the_start(
    broken: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama3 = MODELS.get("llama3")
    if "layout" in broken:
        broken = {"layout": dataclasses.replace(llama3.layout, **broken["layout"])}
    monkeypatch.setitem(MODELS._items, "broken", dataclasses.replace(llama3, **broken))
    config = load_config([*tiny_argv(tmp_path), "--model.name=broken"])
    with pytest.raises(ConfigError) as caught:
        resolve_job(config, 1)
    assert caught.value.key == "model.name" and said in caught.value.problem
