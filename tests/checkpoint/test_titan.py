"""Steps as TorchTitan writes them, made here with its names; its own files are read in tests/peers."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from upath import UPath

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.titan import TitanStep, holds_run
from torchtitan.errors import CheckpointError, ConfigError

NAMES = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight"]
GROUP = {"lr": 6e-4, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def state_of_a_run(marker: Path) -> dict[str, Any]:
    weights = {name: torch.full((4, 2), float(i)) for i, name in enumerate(NAMES)}
    optimizer: dict[str, Any] = {}
    for name, weight in weights.items():
        moments = {"exp_avg": weight + 0.5, "exp_avg_sq": weight + 0.25, "step": torch.tensor(5.0)}
        optimizer |= {f"state.{name}.{key}": value for key, value in moments.items()}
        optimizer |= {f"param_groups.{name}.{key}": value for key, value in GROUP.items()}
    return {
        **weights,
        "optimizer": optimizer,
        "train_state": {"step": 5, "ntokens_seen": 1280},
        "lr_scheduler": {"last_epoch": 5, "base_lrs": [1e-3]},
        "dataloader": {"world_size": 2, "dp_rank_0": pickle.dumps(Trap(marker)), "dp_rank_1": Trap(marker)},
    }


def saved(folder: Path, state: dict[str, Any]) -> Reader:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return Reader(UPath(folder))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "unpickled"


@pytest.fixture
def step(tmp_path: Path, marker: Path) -> TitanStep:
    return TitanStep(saved(tmp_path / "step-5", state_of_a_run(marker)))


def test_what_a_step_says(tmp_path: Path, step: TitanStep, marker: Path) -> None:
    assert (step.step, step.tokens_seen) == (5, 2560)
    recorded = step.recorded(NAMES, ["lr", "betas", "weight_decay", "momentum"])
    assert recorded == {name: {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1} for name in NAMES}
    reader = Reader(UPath(tmp_path / "step-5"))
    assert holds_run(reader) and sorted(reader.weights) == sorted(NAMES)
    assert reader.tensor(f"optimizer.state.{NAMES[1]}.exp_avg").eq(1.5).all()
    assert not marker.exists()


def test_the_state_of_the_data_loader_is_never_unpickled(tmp_path: Path, step: TitanStep, marker: Path) -> None:
    reader = Reader(UPath(tmp_path / "step-5"))
    assert isinstance(reader.value("dataloader.dp_rank_0"), bytes)
    with pytest.raises(CheckpointError, match=r"dataloader\.dp_rank_1 in .* holds more than tensors and plain values"):
        reader.value("dataloader.dp_rank_1")
    assert not marker.exists()
    pickle.loads(reader.value("dataloader.dp_rank_0"))
    assert marker.exists()  # which is what it would have done


def test_weights_alone_cannot_be_gone_on_from(tmp_path: Path, marker: Path) -> None:
    weights = {name: value for name, value in state_of_a_run(marker).items() if name in NAMES}
    reader = saved(tmp_path / "step-9", weights)
    assert not holds_run(reader)
    with pytest.raises(
        ConfigError, match=r"checkpoint\.initial_load_model_only: .*step-9 holds weights alone"
    ) as raised:
        TitanStep(reader)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("written", [torch.tensor(7, dtype=torch.int32), torch.tensor([7.0]), 7])
def test_steps_are_numbers_or_tensors(tmp_path: Path, written: Any) -> None:
    step = TitanStep(saved(tmp_path / "step-7", {"w": torch.ones(1), "train_state": {"step": written}}))
    assert (step.step, step.tokens_seen) == (7, None)


@pytest.mark.parametrize("written", ["seven", -1, 1.5, float("inf"), True, [7], torch.tensor([1, 2]), None])
def test_a_step_that_is_no_number(tmp_path: Path, written: Any) -> None:
    reader = saved(tmp_path / "step-7", {"w": torch.ones(1), "train_state": {"step": written}})
    with pytest.raises(CheckpointError, match=r"train_state\.step in .*step-7 is no number"):
        TitanStep(reader)


def test_optimizers_that_can_go_on(step: TitanStep) -> None:
    step.check_optimizer(dict.fromkeys(NAMES, "AdamW"))
    step.check_optimizer({**dict.fromkeys(NAMES, "AdamW"), NAMES[0]: "Adam"})


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (dict.fromkeys(NAMES, "SGD"), r"optimizer\.name: .* updated by SGD"),
        ({**dict.fromkeys(NAMES, "AdamW"), NAMES[1]: "Muon"}, r"optimizer\.groups: .*wq\.weight is updated by Muon"),
        ({"output.weight": "AdamW"}, r"checkpoint\.initial_load_path: .* holds no exp_avg of output\.weight"),
    ],
)
def test_optimizers_that_cannot(step: TitanStep, optimizers: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        step.check_optimizer(optimizers)
    assert "exclude_from_loading" in str(raised.value)


def test_what_is_configured_otherwise_is_told(step: TitanStep) -> None:
    same = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert step.differences(dict.fromkeys(NAMES, same)) == []
    told = step.differences({name: {**same, "eps": 1e-6, "betas": (0.9, 0.99)} for name in NAMES})
    assert [line.split(" in ")[0] for line in told] == ["betas was [0.9, 0.95]", "eps was 1e-08"]
    assert told[1].endswith("and is 1e-06 in this run from now on")
    (line,) = step.differences({**dict.fromkeys(NAMES, same), "norm.weight": {**same, "weight_decay": 0}})
    assert "weight_decay was 0.1" in line and "for norm.weight, and is 0.0" in line
    (line,) = step.differences({name: same if name == NAMES[0] else {**same, "weight_decay": 0.0} for name in NAMES})
    assert f"for {NAMES[1]} and 1 more" in line
    assert step.differences({"norm.weight": {"nesterov": True}}) == []  # of which the step says nothing
