"""What blocks keep for the backward pass: how much memory, which of them, what is refused; that numbers stay the same
is in equivalence/test_passes.py."""

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.kept_memory import MODES, build, kept_bytes
from torchtitan.config.schema import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchtitan.distributed.passes import check_activation_checkpoint
from torchtitan.distributed.pipeline import prune
from torchtitan.distributed.spread import Spread
from torchtitan.distributed.stages import PipelinePlan
from torchtitan.distributed.topology import Degrees
from torchtitan.errors import ConfigError
from torchtitan.models.spec import Layout

LAYOUT = Layout(stem=("stem",), blocks="layers", head=("head",))


def test_memory_of_each_mode() -> None:
    kept = [kept_bytes(build(keys)) for keys in MODES.values()]
    print([f"{share / kept[0]:.3f}" for share in kept])
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] <= kept[0] / 4  # measured: 0.06
    assert kept[2] <= 0.6 * kept[0] and kept[3] <= 0.5 * kept[0]


def test_a_product_of_a_forced_shape_is_not_kept() -> None:
    op = {"mode": "selective", "selective_ac_option": "op"}
    kept = [
        kept_bytes(build(ActivationCheckpoint(**op, per_op_sac_force_recompute_mm_shapes_by_fqns=parts), layers=2))
        for parts in (["no.such"], ["feed_forward.w1"], ["attention", "feed_forward"])
    ]
    assert kept[0] > kept[1] > kept[2]


class Counted(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.passes = nn.Parameter(torch.tensor(2.0)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return (self.scale * x).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Identity(), nn.Identity()
        self.layers = nn.ModuleDict({str(i): Counted() for i in range(6)})


@pytest.mark.parametrize(
    ("option", "stage", "passes"),
    [
        ("1", "012345", [2, 2, 2, 2, 2, 2]),
        ("2", "012345", [1, 2, 1, 2, 1, 2]),
        ("3", "012345", [1, 1, 2, 1, 1, 2]),
        ("9", "012345", [1, 1, 1, 1, 1, 1]),
        ("2", "345", [2, 1, 2]),  # counted in the whole model
    ],
)
def test_every_nth_block_is_computed_twice(option: str, stage: str, passes: list[int]) -> None:
    model = Model()
    prune(model, LAYOUT, [f"layers.{i}" for i in stage])
    keys = ActivationCheckpoint(mode="selective", selective_ac_option=option)
    apply_activation_checkpoint(model, LAYOUT, keys, list("012345"))
    x = torch.ones(3, requires_grad=True)
    for block in model.layers.values():
        x = block(x)
    x.sum().backward()
    assert [block.passes for block in model.layers.values()] == passes
    assert [name for name, _ in model.named_parameters()] == [f"layers.{i}.scale" for i in stage]


def test_random_numbers_are_drawn_again() -> None:
    found = []
    for mode in ("none", "full"):
        torch.manual_seed(0)
        model = build(ActivationCheckpoint(mode=mode))
        for block in model.get_submodule("layers").children():
            block.get_submodule("attention_norm").register_forward_hook(
                lambda module, inputs, out: nn.functional.dropout(out, 0.5)
            )
        torch.manual_seed(1)
        model(torch.arange(8)[None], torch.arange(8)[None]).logsumexp(-1).sum().backward()
        found.append([p.grad for p in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None
        assert torch.equal(plain, again)


PARAMETERS = {"stem.weight": (4, 4), "layers.0.attention.wq.weight": (4, 4), "layers.0.norm.weight": (4,)}


def zero_bubble() -> Spread:
    plan = PipelinePlan(2, ((),) * 4, (0, 1, 1, 0), "ZBVZeroBubble", 4, None)
    return Spread(degrees=Degrees(shard=1, pipeline=2), pipeline=plan)


@pytest.mark.parametrize(
    ("spread", "parts", "says"),
    [
        (
            zero_bubble(),
            None,
            "selective_ac_option: what op keeps is used up by one backward pass, and the pipeline's ZB",
        ),
        (Spread(), ["wqq"], "no linear map has 'wqq' in its name; names look like layers.0.attention.wq$"),
        (Spread(), ["stem"], "no linear map has 'stem'"),
    ],
)
def test_refusals(spread: Spread, parts: list[str] | None, says: str) -> None:
    more = {} if parts is None else {"per_op_sac_force_recompute_mm_shapes_by_fqns": parts}
    keys = ActivationCheckpoint(mode="selective", selective_ac_option="op", **more)
    with pytest.raises(ConfigError, match=says):
        check_activation_checkpoint(keys, spread, LAYOUT, PARAMETERS)
    keys = ActivationCheckpoint(mode="full", **more)
    check_activation_checkpoint(keys, spread, LAYOUT, PARAMETERS)
    check_activation_checkpoint(
        ActivationCheckpoint(mode="selective", selective_ac_option="op"), Spread(), LAYOUT, PARAMETERS
    )
    with pytest.raises(ConfigError, match=r"^activation_checkpoint\.mode: torch's compiler cannot compute again"):
        check_activation_checkpoint(
            ActivationCheckpoint(mode="memory_budget"), Spread(degrees=Degrees(shard=1, tensor=2)), LAYOUT, PARAMETERS
        )
