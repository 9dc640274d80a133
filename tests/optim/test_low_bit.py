"""Optimizers with states in eight bits on one process: torchao's to the bit, and what of a model they keep so."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan.checkpoint.tensors import Tensors
from torchtitan.errors import ConfigError
from torchtitan.optim import low_bit
from torchtitan.optim.blocks import kept_in_blocks
from torchtitan.optim.groups import OptimizerPlan, check_plan, plan_optimizer
from torchtitan.optim.parts import LocalOptimizer, Parts

NAMES = {"AdamW8bit": torch.uint8, "AdamWFp8": torch.float8_e4m3fn}
NAMES |= {"Adam8bit": torch.uint8, "AdamFp8": torch.float8_e4m3fn}
SHAPES = {"matrix": (64, 256), "narrow": (63, 100), "norm": (256,), "table": (40, 4, 128), "vector": (4096,)}
IN_BLOCKS = {"matrix", "table", "vector"}


def planned(name: str, *groups: Mapping[str, Any], **options: Any) -> OptimizerPlan:
    return plan_optimizer(name, options, lr=3e-3, weight_decay_exclude=["norm"], groups=groups)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def give_gradients(own: Mapping[str, Tensor], step: int) -> None:
    torch.manual_seed(step)
    for parameter in own.values():
        drawn = torch.randn(parameter.shape)
        parameter.grad = drawn * drawn.abs() ** 3  # of very different sizes in a block


def train(optimizer: torch.optim.Optimizer, own: Mapping[str, Tensor], steps: int = 4) -> None:
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(3e-3 / step)
            else:
                group["lr"] = 3e-3 / step
        give_gradients(own, step)
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_torchaos_to_the_bit(name: str) -> None:
    import torchao.optim

    own, theirs = parameters(), parameters()
    optimizer = planned(name).build(own.items())
    groups = [
        {"params": [p for key, p in theirs.items() if (key == "norm") == norms], "weight_decay": 0.0 if norms else 0.1}
        for norms in (False, True)
    ]
    reference = getattr(torchao.optim, name)(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, block_size=128)
    train(optimizer, own)
    torch.compiler.set_stance("force_eager")
    try:
        train(reference, theirs)
    finally:
        torch.compiler.set_stance("default")
    for key in SHAPES:
        state, kept = optimizer.state[own[key]], reference.state[theirs[key]]["exp_avg_sq"]
        assert torch.equal(own[key], theirs[key]), key
        if key in IN_BLOCKS:
            assert torch.equal(state["exp_avg_sq_codes"].view(torch.uint8), kept.codes.view(torch.uint8))
            assert torch.equal(state["exp_avg_sq_scale"].view(-1), kept.scale)
        else:
            assert torch.equal(state["exp_avg_sq"], kept)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_follows_from_the_shape(name: str) -> None:
    own = parameters()
    optimizer = planned(name).build(own.items())
    train(optimizer, own, 1)
    for key, parameter in own.items():
        state = optimizer.state[parameter]
        if key not in IN_BLOCKS:
            assert {k: (v.shape, v.dtype) for k, v in state.items() if k != "step"} == dict.fromkeys(
                ("exp_avg", "exp_avg_sq"), (parameter.shape, torch.float32)
            )
            continue
        assert kept_in_blocks(SHAPES[key], 128)
        scales = (*SHAPES[key][:-1], SHAPES[key][-1] // 128)
        assert {k: (tuple(v.shape), v.dtype) for k, v in state.items() if k != "step"} == {
            "exp_avg_codes": (SHAPES[key], NAMES[name]),
            "exp_avg_sq_codes": (SHAPES[key], NAMES[name]),
            "exp_avg_scale": (scales, torch.float32),
            "exp_avg_sq_scale": (scales, torch.float32),
        }


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_pieces_and_graphs_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how many numbers are updated at once, nor a graph, of which there are two at most, whatever the rate."""
    own, pieces, graph = parameters(), parameters(), parameters()
    train(planned(name).build(own.items()), own)
    monkeypatch.setattr(low_bit, "_PIECE_ON_CPU", 3 * 128)
    train(planned(name).build(pieces.items()), pieces)
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    made = torch.compile(low_bit._updated, backend=backend, fullgraph=True)
    monkeypatch.setattr(low_bit, "_graph", lambda: made)
    train(planned(name, implementation="compiled").build(graph.items()), graph)
    assert all(torch.equal(own[key], pieces[key]) and torch.equal(own[key], graph[key]) for key in SHAPES)
    assert 1 <= len(graphs) <= 3, len(graphs)


class Nothing(Parts):
    """Of a rank that holds no row."""

    def local(self, tensor: Tensor) -> Tensor:
        return tensor[:0] if tensor.dim() else tensor


def test_a_rank_without_a_row_has_nothing_to_do() -> None:
    own = parameters()
    before = {key: parameter.detach().clone() for key, parameter in own.items()}
    optimizer = planned("AdamW8bit").build(own.items(), parts=Nothing())
    assert isinstance(optimizer, LocalOptimizer)
    train(optimizer, own, 2)
    assert all(torch.equal(own[key], before[key]) for key in SHAPES)
    assert optimizer.state[own["matrix"]]["step"] == 2


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_a_step_that_is_withheld_changes_nothing(name: str) -> None:
    own = parameters()
    optimizer = planned(name).build(own.items())
    train(optimizer, own, 2)
    kept = [*own.values(), *(value for p in own.values() for value in optimizer.state[p].values())]
    before = [tensor.detach().clone() for tensor in kept]
    for parameter in own.values():
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = torch.nan
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    for tensor, old in zip(kept, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8)) if tensor.dim() else tensor == old
    optimizer.found_inf.zero_()  # type: ignore[attr-defined]
    twin = parameters()
    train(planned(name).build(twin.items()), twin, 3)
    give_gradients(own, 3)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 3e-3 / 3
    optimizer.step()
    assert all(torch.equal(own[key], twin[key]) for key in SHAPES)


def test_what_would_keep_nothing_in_eight_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"128 divides the last dimension of none .* as wide \[64, 100\]") as error:
        check_plan(planned("AdamWFp8"), {"wide": (64, 100), "norm": (256,)})
    assert error.value.key == "optimizer.block_size"
    check_plan(planned("AdamWFp8", block_size=32), {"wide": (64, 96), "norm": (256,)})
    with pytest.raises(ConfigError, match="must be 32, 64, 128, 256 or 512"):
        planned("AdamW8bit", block_size=100)


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="AdamW8bit needs the package torchao") as error:
        check_plan(planned("AdamW", {"pattern": "matrix", "name": "AdamW8bit"}), SHAPES)
    assert error.value.key == "optimizer.groups[0].name"


def test_states_kept_in_other_blocks_are_refused() -> None:
    own = parameters()
    optimizer = planned("AdamW8bit", block_size=64).build(own.items())
    train(optimizer, own, 1)
    other = planned("AdamW8bit").build(own.items())
    other.state = optimizer.state
    with pytest.raises(ConfigError, match="128 is not what the checkpoint's states were kept with"):
        other.step()


@pytest.mark.parametrize(("name", "device"), [("AdamW8bit", "meta"), ("SGD", "cpu")])
def test_a_checkpoint_puts_numbers_where_they_are_read(name: str, device: str) -> None:
    weight = nn.Parameter(torch.zeros(64, 256, device="meta"))
    optimizer = planned(name).build([("w", weight)])
    Tensors([("w", weight)], ["w"], optimizer)._put_optimizer_state({"state.w.step": torch.tensor(3.0)})
    assert optimizer.state[weight]["step"].device.type == device
