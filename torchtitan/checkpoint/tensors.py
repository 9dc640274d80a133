"""The tensors of a run as a checkpoint names them: weights by their names in the model, optimizer states by theirs.

Files are read and written in ``dcp/``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.distributed.parts import SpreadParts
from torchtitan.errors import CheckpointError, ConfigError


class Tensors:
    """``parameters`` of this rank with the state that ``optimizer`` keeps of each.

    ``names`` are those of the whole model, whoever holds them. A name that comes twice has two copies, which stay
    equal: the first one counts.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Tensor]], names: Collection[str], optimizer: torch.optim.Optimizer
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        self._twins = [(first, p) for name, p in parameters if (first := self.weights.setdefault(name, p)) is not p]
        self.names = names
        self._optimizer = optimizer

    def state(self) -> dict[str, Any]:
        """Everything, as it is now: the tensors themselves, under flat keys as TorchTitan writes them."""
        return {**self.weights, "optimizer": self._optimizer_state()}

    def read(self, reader: Reader, *, model: bool = True, optimizer: bool = True) -> None:
        """Take the parts that are asked for from a step; CheckpointError where it does not hold what they need."""
        into: dict[str, Tensor] = {}
        if model:
            self._check_weights(reader)
            into.update(self.weights)
        moments = self._empty_optimizer_state(reader) if optimizer else {}
        into.update({f"optimizer.{key}": tensor for key, tensor in moments.items()})
        reader.read(into)
        if optimizer:
            self._put_optimizer_state(moments)
        self.equalize_twins()

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        """What the optimizer's groups say of each parameter, by torch's names; the rate before any schedule."""
        weights = {id(parameter): name for name, parameter in self.weights.items()}
        names = ("betas", "eps", "weight_decay")
        return {
            weights[id(parameter)]: {key: group[key] for key in names if key in group} | {"initial_lr": group["lr"]}
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in weights
        }

    @torch.no_grad()
    def equalize_twins(self) -> None:
        """Give second copies the weights and the optimizer state of the first."""
        for first, twin in self._twins:
            twin.copy_(first)
            if first in self._optimizer.state:
                self._optimizer.state[twin] = {key: v.clone() for key, v in self._optimizer.state[first].items()}

    def _check_weights(self, reader: Reader) -> None:
        folder, remedy = reader.folder, "are model.name, model.flavor and model.args those it was saved with?"
        stored = {name: reader.tensors[name].size for name in reader.weights}
        for name in self.names:
            if name not in stored:
                raise CheckpointError(f"{folder} holds no {name}; {remedy}")
        for name, parameter in self.weights.items():
            if stored[name] != parameter.shape:
                raise CheckpointError(
                    f"{folder} holds {name} as {list(stored[name])}, the model wants {list(parameter.shape)}; {remedy}"
                )
        if unwanted := sorted(set(stored) - set(self.names)):
            raise CheckpointError(f"{folder} holds {unwanted[0]}, which the model has not; {remedy}")

    def _optimizer_state(self) -> dict[str, Tensor]:
        state = {
            f"state.{name}.{key}": value
            for name, parameter in self.weights.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"optimizer {key} is of type {type(value).__name__}; only tensors can be saved, so keep one"
                )
        return state

    def _empty_optimizer_state(self, reader: Reader) -> dict[str, Tensor]:
        """Room for the optimizer tensors that a checkpoint holds for the parameters, spread like them."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.weights.items():
            weight = reader.tensors.get(name)
            if weight is not None and weight.properties.dtype != parameter.dtype:
                held = str(weight.properties.dtype).removeprefix("torch.")
                raise ConfigError(
                    "training.dtype",
                    f"{reader.folder} holds {held}; keep that, or start the optimizer anew with "
                    'checkpoint.exclude_from_loading = ["optimizer"]',
                )
        for key, entry in reader.tensors.items():
            name, _, _ = key.removeprefix("optimizer.state.").rpartition(".")
            parameter_of = self.weights.get(name) if key.startswith("optimizer.state.") else None
            if parameter_of is not None:
                state[key.removeprefix("optimizer.")] = _room(parameter_of, entry.size, entry.properties.dtype)
        return state

    def _put_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Rates and decays are the configuration's, never the file's."""
        # As torch does, which keeps numbers on the host but where an optimizer reads them on the device.
        on_device = {
            id(parameter)
            for group in self._optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for parameter in group["params"]
        }
        for name, parameter in self.weights.items():
            prefix = f"state.{name}."
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if own and id(parameter) in on_device:
                own = {key: value.to(parameter.device) for key, value in own.items()}
            if own:
                self._optimizer.state[parameter] = own


def _room(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """For a state of ``size``: spread like ``parameter`` if it has its rows, of which each may have other columns."""
    if size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype)
    if len(size) > 1 and size[:-1] == parameter.shape[:-1]:
        return SpreadParts().zeros(parameter, size[-1], dtype)
    return torch.zeros(size, dtype=dtype)
