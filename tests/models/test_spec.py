"""What a family can be told from outside its file."""

import dataclasses

import pytest

from torchtitan.models.spec import MODELS


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
