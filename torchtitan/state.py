"""The numbers of a run that a checkpoint keeps beside its tensors, and what of them must fit the configuration.

Who saves and loads them is ``checkpoint/``'s; who changes them, the trainer.
"""

import json
from collections.abc import Mapping
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


@dataclass
class DataPosition(_Numbers):
    """The next row of the global order, and the data in whose order it stands."""

    fingerprint: str
    next_row: int = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                "training.dataset",
                "the data, tokenizer, order, debug.seed or training.seq_len are not those of the checkpoint, so its "
                "position means nothing; to begin the new data at their first row, set "
                'checkpoint.exclude_from_loading = ["dataloader"]',
            )
        super().load_state_dict(state)


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
