"""Weights and optimizer states as PyTorch's distributed checkpoints: written and read by any number of ranks.

When that is done, and what else a step holds, is in ``checkpointer.py``.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan.checkpoint.storage import METADATA, CheckpointError
from torchtitan.errors import ConfigError

# Top-level keys of other parts in checkpoints of TorchTitan, which stand beside the model's.
_NO_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


def write_tensors(folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Write everything into ``folder``, this rank its part. Raises OSError where storage fails on any rank."""
    state: dict[str, Any] = {**parameters, "optimizer": optimizer_state(parameters, optimizer)}
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        if all(_is_storage_failure(failure) for failure in failures):
            raise OSError(_one_line(failures[0])) from error
        raise CheckpointError(f"{folder} could not be written: {_one_line(failures[0])}") from error


def read_tensors(
    folder: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    names: Collection[str],
    with_model: bool = True,
    with_optimizer: bool = True,
) -> None:
    """Read into ``parameters`` and ``optimizer``; CheckpointError where the step does not hold what they need.

    ``names`` are those of all parameters of the model, whoever holds them.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
    except Exception as error:  # it is a pickle: anything may come out of a damaged one
        raise CheckpointError(f"{folder / METADATA} cannot be read: {_one_line(error)}") from error
    state: dict[str, Any] = {}
    if with_model:
        check_weights(parameters, names, metadata, folder)
        state.update(parameters)
    moments: dict[str, Tensor] = {}
    if with_optimizer:
        moments = empty_optimizer_state(parameters, metadata, folder)
        state["optimizer"] = moments
    try:
        if state:
            dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{folder} cannot be read: {_one_line(failure)}") from error
    if with_optimizer:
        put_optimizer_state(parameters, optimizer, moments)


def check_weights(parameters: Mapping[str, Tensor], names: Collection[str], metadata: Metadata, folder: Path) -> None:
    """CheckpointError if a step holds other weights than those of ``names``, or ``parameters`` of other shapes."""
    stored = {
        name: entry.size
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NO_WEIGHTS)
    }
    remedy = "are model.name, model.flavor and model.args those it was saved with?"
    for name in names:
        if name not in stored:
            raise CheckpointError(f"{folder} holds no {name}; {remedy}")
    for name, parameter in parameters.items():
        if stored[name] != parameter.shape:
            raise CheckpointError(
                f"{folder} holds {name} as {list(stored[name])}, the model wants {list(parameter.shape)}; {remedy}"
            )
    if unwanted := sorted(set(stored) - set(names)):
        raise CheckpointError(f"{folder} holds {unwanted[0]}, which the model has not; {remedy}")


def optimizer_state(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for each parameter, under flat keys ``state.<parameter>.<name>``, as
    TorchTitan writes them."""
    state = {
        f"state.{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"optimizer {key} is of type {type(value).__name__}; only tensors can be saved, so keep one"
            )
    return state


def empty_optimizer_state(parameters: Mapping[str, Tensor], metadata: Metadata, folder: Path) -> dict[str, Tensor]:
    """Room for the optimizer tensors that a checkpoint holds for ``parameters``, spread like them."""
    stored = metadata.state_dict_metadata
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        weight = stored.get(name)
        if isinstance(weight, TensorStorageMetadata) and weight.properties.dtype != parameter.dtype:
            held = str(weight.properties.dtype).removeprefix("torch.")
            raise ConfigError(
                "training.dtype",
                f"{folder} holds {held}; keep that, or start the optimizer anew with "
                'checkpoint.exclude_from_loading = ["optimizer"]',
            )
        prefix = f"optimizer.state.{name}."
        for full_key, entry in stored.items():
            if full_key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
                like_weight = entry.size == parameter.shape
                dtype = entry.properties.dtype
                room = torch.zeros_like(parameter, dtype=dtype) if like_weight else torch.zeros(entry.size, dtype=dtype)
                state[full_key.removeprefix("optimizer.")] = room
    return state


def put_optimizer_state(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Give the optimizer its tensors back. Rates and decays are the configuration's, never the file's."""
    for name, parameter in parameters.items():
        prefix = f"state.{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if own:
            optimizer.state[parameter] = own


@torch.no_grad()
def copy_state(parameter: Tensor, twin: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Give ``twin``, spread like ``parameter``, its weights and its optimizer state."""
    twin.copy_(parameter)
    if parameter in optimizer.state:
        optimizer.state[twin] = {key: value.clone() for key, value in optimizer.state[parameter].items()}


def _is_storage_failure(failure: BaseException) -> bool:
    # torch's zip writer reports a disk that is full as a RuntimeError about the position in the file.
    return isinstance(failure, OSError) or (isinstance(failure, RuntimeError) and "unexpected pos" in str(failure))


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if "unexpected pos" in str(error):
        return "No space left on device"
    return text[0] if text else type(error).__name__
