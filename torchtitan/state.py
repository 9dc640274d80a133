"""The numbers of a run that a checkpoint keeps beside its tensors, and what of them must fit the configuration.

Who saves and loads them is ``checkpoint/``'s; who changes them, the trainer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchtitan.errors import ConfigError
from torchtitan.log import logger


@dataclass
class _Numbers:
    """Numbers of the run that a checkpoint keeps as JSON."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for field in fields(self):
            value, own = state[field.name], getattr(self, field.name)
            if type(value) is not type(own) or (isinstance(value, int) and value < 0):
                raise ValueError(f"{field.name} is {value!r}")
            setattr(self, field.name, value)


@dataclass
class TrainState(_Numbers):
    """Steps done, tokens trained on over all ranks, and rows of a step."""

    step: int = 0
    tokens_seen: int = 0
    global_batch_size: int = 0


@dataclass(frozen=True)
class DataStage:
    """What the data are from step ``from_step`` on, counted from 1: ``fingerprint`` is equal only where every row is.
    ``key`` is what to change for another step."""

    from_step: int
    fingerprint: str
    key: str = "training.dataset"


class DataPosition:
    """The next row of the global order, and the data in whose order it stands, stage by stage.

    ``begins`` are the rows that stages begin with: those of the past as they were, the others once ``place_stages`` has
    been called.
    """

    def __init__(self, stages: Sequence[DataStage]) -> None:
        self.stages = stages
        self.next_row = 0
        self.begins: list[int] = []

    def place_stages(self, step: int, rows_of_a_step: int) -> list[int]:
        """The row that each stage begins with, of a run that has done ``step`` steps; ConfigError for a stage that
        should have begun before them and is new to the checkpoint."""
        known = len(self.begins)
        for stage in self.stages[known:]:
            begin = self.next_row + (stage.from_step - 1 - step) * rows_of_a_step
            if known and begin < self.next_row:
                raise ConfigError(
                    stage.key,
                    f"is not after step {step}, at which a checkpoint was saved without it; take a later one",
                )
            self.begins.append(max(begin, 0))
        return self.begins

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"fingerprint": self.stages[0].fingerprint, "next_row": self.next_row}
        begun = [
            [begin, stage.fingerprint, stage.from_step]
            for begin, stage in zip(self.begins, self.stages, strict=False)
            if begin < self.next_row or begin == 0
        ]
        return state if len(self.stages) == 1 else state | {"stages": begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        begun = state.get("stages", [[0, state["fingerprint"], 1]])
        blended = len(begun) > 1 or len(self.stages) > 1
        for number, (_, fingerprint, *_) in enumerate(begun):
            if number < len(self.stages) and fingerprint == self.stages[number].fingerprint:
                continue
            which = f" of part {number + 1} of the run, which has begun," if blended else ""
            remedy = "; put back what it was, and let what is new begin at a later from_step" if blended else ""
            raise ConfigError(
                "data.sources" if blended else "training.dataset",
                f"the data, their weights, tokenizer, order, debug.seed or training.seq_len{which} are not those of "
                f"the checkpoint, so its position means nothing{remedy}; to begin the new data at their first row, set "
                'checkpoint.exclude_from_loading = ["dataloader"]',
            )
        next_row, begins = state["next_row"], [begin for begin, *_ in begun]
        for number in (next_row, *begins):
            if type(number) is not int or number < 0:
                raise ValueError(f"a row is {number!r}")
        for stage, (_, _, *from_step) in zip(self.stages, begun, strict=False):
            if from_step and from_step[0] != stage.from_step:  # older checkpoints do not say it
                raise ConfigError(
                    stage.key,
                    f"was {from_step[0]} when the checkpoint was saved, and this part of the run is over; keep that",
                )
        self.next_row, self.begins = next_row, begins


@dataclass
class ModelFacts:
    """What the weights mean beyond their shapes; a resume with other facts would be another model."""

    args: dict[str, Any]

    @staticmethod
    def of(args: Any) -> "ModelFacts":
        """Those of a family's hyper-parameters, a dataclass."""
        return ModelFacts(json.loads(json.dumps(asdict(args))))

    def state_dict(self) -> dict[str, Any]:
        return self.args

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self.args.items():
            if name not in state or state[name] == value:
                continue
            was = f"was {state[name]} when the checkpoint was saved"
            # Whole numbers and switches are the structure; rates and factors may be changed on purpose.
            if isinstance(value, (int, type(None))):
                raise ConfigError(f"model.args.{name}", f"{was}; keep that, or start from its weights elsewhere")
            logger.warning(f"model.args.{name} {was}, and is {value} now")


@dataclass
class OptimizerFacts:
    """Whose states the checkpoint holds: ``name`` is the optimizer of every parameter but those that ``by_parameter``
    gives to another."""

    name: str
    by_parameter: Mapping[str, str]

    def state_dict(self) -> dict[str, Any]:
        others = {parameter: name for parameter, name in self.by_parameter.items() if name != self.name}
        return {"name": self.name, "others": others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        others = state.get("others", {})  # older checkpoints know of one optimizer only
        for parameter, name in self.by_parameter.items():
            was = others.get(parameter, state["name"])
            if was == name:
                continue
            anew = 'to start the optimizer anew, set checkpoint.exclude_from_loading = ["optimizer"]'
            if not others and set(self.by_parameter.values()) == {self.name}:
                raise ConfigError("optimizer.name", f"the checkpoint holds the states of {was}; {anew}")
            raise ConfigError(
                "optimizer.groups", f"the checkpoint holds {was}'s state of {parameter}, which is {name}'s now; {anew}"
            )


@dataclass
class ScheduleStart(_Numbers):
    """The step after which the learning-rate schedule began."""

    after_step: int = 0
