"""What converters may leave of a model: names as they were, ties as the family tells them, no buffers."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchtitan.distributed.convert import convert_model
from torchtitan.errors import ConfigError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 3)
        self.norm = nn.RMSNorm(3)
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight


TIED = {"last.weight": "first.weight"}


def rename(model: nn.Module) -> None:
    model.other = model.norm
    del model.norm


def add(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2, bias=False)


def share(model: nn.Module) -> None:
    model.norm.weight = model.first.weight  # type: ignore[assignment, union-attr]


def keep_a_buffer(model: nn.Module) -> None:
    model.norm.register_buffer("scale", torch.ones(1), persistent=False)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("converter", "said"),
    [
        (rename, "parameter norm.weight is gone after them|parameter other.weight is new"),
        (add, "parameter extra.weight is new after them"),
        (share, "parameters are shared after them"),
        (keep_a_buffer, "buffer norm.scale would be lost"),
    ],
)
def test_what_could_not_be_spread_is_refused(converter: Callable[[nn.Module], None], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.converters: ({said})"):
        convert_model(Tied(), [converter], TIED)


def test_a_tied_module_that_is_replaced_is_tied_again() -> None:
    model = Tied()
    convert_model(model, [lambda m: m.set_submodule("last", nn.Linear(3, 5, bias=False))], TIED)
    assert model.last.weight is model.first.weight


def test_a_buffer_of_the_model_itself_is_refused() -> None:
    model = Tied()
    keep_a_buffer(model)
    with pytest.raises(ConfigError, match=r"model\.name: buffer norm\.scale"):
        convert_model(model, [], TIED)
