"""A step that TorchTitan wrote: what it holds beside the tensors, and whether a run can go on from it.

Tensors are read as those of any other step (``dcp/reader.py``); ours say the same in their manifest. TorchTitan pickles
the state of its data loader, which is never opened here: where the data go on follows from the step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.errors import CheckpointError, ConfigError

_STEP = "train_state.step"
_GROUPS = "optimizer.param_groups."
_ADAM = ("Adam", "AdamW")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def holds_run(reader: Reader) -> bool:
    """Whether the step holds a run's state and not its weights alone. To be asked where there is no manifest."""
    return _STEP in reader.values or _STEP in reader.tensors


class TitanStep:
    """The numbers of one step of TorchTitan's.

    ConfigError if it holds weights alone, CheckpointError if its numbers cannot be read.
    """

    def __init__(self, reader: Reader) -> None:
        if not holds_run(reader):
            raise ConfigError(
                "checkpoint.initial_load_model_only",
                f"{reader.folder} holds weights alone (no {_STEP}); leave it true to start from them",
            )
        self._reader = reader
        self.step = self._count(_STEP)
        """Steps that were done."""

    @property
    def tokens_seen(self) -> int | None:
        """Tokens trained on over all ranks, if the step says so; it counts those of one reader of the data."""
        if not {"train_state.ntokens_seen", "dataloader.world_size"} <= {*self._reader.values, *self._reader.tensors}:
            return None
        return self._count("train_state.ntokens_seen") * self._count("dataloader.world_size")

    def recorded(self, parameters: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer's groups said: for each of ``parameters`` those of ``names`` that are recorded.

        Names are torch's (lr, initial_lr, betas, eps, weight_decay, …); lr is that of the step after this one.
        """
        keys = {f"{_GROUPS}{parameter}.{name}": (parameter, name) for parameter in parameters for name in names}
        recorded: dict[str, dict[str, Any]] = {parameter: {} for parameter in parameters}
        for key, value in self._reader.read_values(key for key in keys if key in self._reader.values).items():
            parameter, name = keys[key]
            recorded[parameter][name] = value
        return recorded

    def check_optimizer(self, optimizers: Mapping[str, str]) -> None:
        """ConfigError if the run's optimizers, by parameter, cannot go on from the states that the step holds."""
        anew = 'to start the optimizer anew, set checkpoint.exclude_from_loading = ["optimizer"]'
        for parameter, name in optimizers.items():
            if missing := next((m for m in _MOMENTS if _state(parameter, m) not in self._reader.tensors), None):
                raise ConfigError(
                    "checkpoint.initial_load_path",
                    f"{self._reader.folder} holds no {missing} of {parameter}, which Adam and AdamW need; {anew}",
                )
            if name not in _ADAM:
                key = "optimizer.name" if len(set(optimizers.values())) == 1 else "optimizer.groups"
                raise ConfigError(
                    key,
                    f"{self._reader.folder} holds states of Adam, and {parameter} is updated by {name}; {anew}",
                )

    def differences(self, configured: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """One line for each hyper-parameter of which the run is ``configured`` otherwise than the step records.

        ``configured`` are values by parameter and by torch's names. The run's own ones hold; these lines say so.
        """
        names = sorted({name for values in configured.values() for name in values})
        recorded = self.recorded(list(configured), names)
        lines = []
        for name in names:
            pairs: Counter[tuple[str, str]] = Counter()
            example: dict[tuple[str, str], str] = {}
            for parameter, values in configured.items():
                if name not in values or name not in recorded[parameter]:
                    continue
                was, now = _plain(recorded[parameter][name]), _plain(values[name])
                if was != now:
                    pairs[str(was), str(now)] += 1
                    example.setdefault((str(was), str(now)), parameter)
            for (was_text, now_text), count in pairs.items():
                whose = "" if count == len(configured) else f" for {example[was_text, now_text]}"
                whose += f" and {count - 1} more" if whose and count > 1 else ""
                lines.append(
                    f"{name} was {was_text} in {self._reader.folder}{whose}, and is {now_text} in this run from now on"
                )
        return lines

    def _count(self, name: str) -> int:
        if name in self._reader.tensors:  # as older versions write it
            entry = self._reader.tensors[name]
            value = self._reader.tensor(name).item() if entry.size.numel() == 1 else None
        else:
            value = self._reader.value(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{name} in {self._reader.folder} is no number of anything")
        return value


def _state(parameter: str, name: str) -> str:
    return f"optimizer.state.{parameter}.{name}"


def _plain(value: Any) -> Any:
    """Tuples and lists are the same, and so are 0 and 0.0."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
