"""Tensor parallelism: roles, the parts of a module, what is refused; whole models are compared in equivalence/."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, init_device_mesh

from tests.launch import run_ranks
from torchtitan.distributed.gradients import sum_gradients
from torchtitan.distributed.spread import check_tensor
from torchtitan.distributed.tensor import apply_tensor_parallel, tensor_seams
from torchtitan.distributed.topology import Degrees
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError
from torchtitan.loss.losses import LOSSES
from torchtitan.models.spec import Divisible, Role, roles_of


class Biased(nn.Module):
    """Every role once, biases everywhere: ``[batch, seq]`` → logits over a vocabulary that no degree divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.inner = Inner()
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.inner(self.norm(x)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Doubled(8, 12)
        self.head_norm = nn.RMSNorm(3)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        heads = self.head_norm(self.up(x).view(batch, seq, -1, 3))
        return self.down(heads.flatten(-2).tanh())


class Doubled(nn.Linear):
    """What a converter might put in: a subclass that calls the forward pass it inherits."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


ROLES: dict[str, Role] = {
    "embed": "embedding",
    "norm": "norm",
    "inner": "gather",
    "inner.up": "column",
    "inner.head_norm": "head_norm",
    "inner.down": "row",
    "head": "head",
}


def wide(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def step(model: nn.Module, tokens: Tensor, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    value = loss(model(tokens), (tokens * 3 + 1) % 11)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(world: World) -> dict[str, float]:
    cross_entropy = LOSSES.bind("cross_entropy", {}, key="loss")()
    tokens = torch.arange(16).view(2, 8) % 11
    expected_value, expected = step(wide(Biased()), tokens, cross_entropy)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    found = {}
    for spread_logits in (True, False):
        model = wide(Biased())
        apply_tensor_parallel(model, ROLES, {}, mesh, spread_logits=spread_logits)
        seams = tensor_seams(cross_entropy, mesh, 11, spread_logits=spread_logits)
        assert ("loss" in seams) == spread_logits
        value, _ = step(model, tokens, seams.get("loss", cross_entropy))
        parameters = list(model.parameters())
        seams["complete_gradients"](parameters)
        found[f"loss, {spread_logits}"] = abs(float(value / expected_value - 1))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            difference = parameter.grad.full_tensor() - expected[name]
            found[f"{name}, {spread_logits}"] = float(difference.norm() / expected[name].norm())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_role_with_biases_is_exact(ranks: int) -> None:
    for found in run_ranks(compare, ranks):
        wrong = {name: value for name, value in found.items() if value > 1e-5}
        assert not wrong


def summed(world: World) -> list[list[float]]:
    import torch.distributed as dist

    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 3)), nn.Parameter(torch.zeros(4))]
    parameters[0].grad = torch.full((2,), world.rank + 1.0)
    parameters[1].grad = torch.full((1, 3), 10.0 * world.rank)
    assert dist.group.WORLD is not None
    sum_gradients(parameters, dist.group.WORLD)
    sum_gradients([], dist.group.WORLD)
    assert parameters[2].grad is None
    return [p.grad.flatten().tolist() for p in parameters[:2] if p.grad is not None]


def test_gradients_are_summed_together() -> None:
    assert run_ranks(summed, 2) == [[[3.0, 3.0], [10.0, 10.0, 10.0]]] * 2


def test_a_module_with_parameters_and_no_role_is_told() -> None:
    roles = {name: role for name, role in ROLES.items() if name != "inner.down"}
    with pytest.raises(LookupError, match=r"inner\.down"):
        list(roles_of(Biased(), roles))


def test_a_star_stands_for_one_name() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict({"w": nn.Linear(1, 1)})})})
    assert list(roles_of(model, {"layers.*.w": "column"})) == [("layers.0.w", "column")]
    with pytest.raises(LookupError):
        list(roles_of(model, {"layers.*": "column"}))


@pytest.mark.parametrize(
    ("degrees", "divisible", "seq_len", "vocab_size", "key", "said"),
    [
        (Degrees(tensor=4), (6, 6, 8), 16, 99, "parallelism.tensor_parallel_degree", "6 query heads; try 1, 2"),
        (Degrees(tensor=4), (8, 2, 8), 16, 99, "parallelism.tensor_parallel_degree", "2 key-value heads; try 1, 2"),
        (Degrees(tensor=4), (8, 8, 6), 16, 99, "parallelism.tensor_parallel_degree", "6 ffn features; try 1, 2"),
        (Degrees(tensor=4), (8, 8, 8), 16, 5, "parallelism.tensor_parallel_degree", "vocabulary of 5"),
        (Degrees(tensor=4), (8, 8, 8), 18, 99, "training.seq_len", "over 4 ranks; try 16"),
        (Degrees(tensor=4), (8, 8, 8), 3, 99, "training.seq_len", "try 4"),
        (Degrees(tensor=2, context=3), (8, 8, 8), 16, 99, "training.seq_len", "3 context × 2 tensor ranks; try 12"),
    ],
)
def test_what_does_not_divide_is_refused(
    degrees: Degrees, divisible: tuple[int, int, int], seq_len: int, vocab_size: int, key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_tensor(replace(degrees, shard=1), Divisible(*divisible), seq_len, vocab_size)
    assert refused.value.key == key


def test_what_divides_passes() -> None:
    check_tensor(Degrees(shard=1, tensor=4, context=2), Divisible(8, 4, 12), 16, 101)


def refusal(world: World) -> str:
    model = Biased()
    model.inner.up.forward = lambda x: x  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    with pytest.raises(ConfigError) as raised:
        apply_tensor_parallel(model, ROLES, {}, mesh, spread_logits=True)
    return f"{raised.value.key}: {raised.value.problem}"


def test_a_forward_that_would_be_lost_is_refused() -> None:
    (told,) = run_ranks(refusal, 1)
    assert told.startswith("model.converters: gave module inner.up another forward")


def test_a_table_of_positions_too_short_for_all_tensor_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="of a table of positions of 49, not all of 8 ranks would get a part"):
        check_tensor(Degrees(shard=1, tensor=8), Divisible(8, 8, 64), 48, 301, 49)
