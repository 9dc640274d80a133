"""Weights of a Hugging Face folder for a model of ours, whatever part of it a rank holds.

What holds what is told in ``models/huggingface.py``, how files are read in ``files.py``, and new ones are
planned in ``export.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.huggingface.files import CONFIG, WeightFolder
from torchtitan.errors import CheckpointError, ConfigError, brief
from torchtitan.log import note_once
from torchtitan.models.huggingface import TensorTable, from_config, to_config
from torchtitan.models.spec import ModelSpec
from torchtitan.models.twin import AsItIs, RotaryHalves, Stored


def load_weights(folder: str | Path, spec: ModelSpec, args: Any, parameters: Mapping[str, Tensor]) -> None:
    """Fill what this rank holds of ``parameters``, tensors of a whole model of ``args`` by name, plain or spread over
    ranks, with the weights in ``folder``; each rank by itself, and only its part is read where that can be.

    Before anything is changed, ConfigError on ``model.args`` where the folder is of another model, and CheckpointError
    where it cannot be used. CheckpointError if two copies of a tied weight differ in what this rank holds.
    """
    weights = WeightFolder(folder)
    check_args(weights, spec, args)
    source = Source(weights, spec, args)
    tied = spec.tied(args)
    wanted = {name: tied.get(name, name) for name in parameters}
    for name, first in wanted.items():
        shape, wants = source.shapes.get(first), parameters[name].shape
        if shape != wants:
            raise CheckpointError(
                f"{folder} holds {name} as {shape and list(shape)}, but here it is to be {list(wants)}"
            )
    for name in sorted(wanted, key=lambda name: source.place(wanted[name])):
        source.fill(wanted[name], parameters[name])


def check_args(weights: WeightFolder, spec: ModelSpec, args: Any) -> None:
    """ConfigError, on the key of ours, where the folder's hyper-parameters are not ``args``. Whole numbers, switches
    and words are the structure; rates and factors may be changed on purpose, which is said once."""
    path, ours, twin = weights.folder / CONFIG, to_config(spec, args), spec.huggingface
    assert twin is not None, "else there is no such config"
    if weights.config.get("model_type") != twin.model_type:
        kind = brief(repr(weights.config.get("model_type")))
        raise ConfigError("model.name", f"this family is {twin.model_type!r} for {path}, which has model_type={kind}")
    theirs = to_config(spec, args_of(weights, spec))
    for name, value in ours.items():
        was = theirs[name]
        if value == was:
            continue
        key = f"model.args.{twin.keys[name].field if name in twin.keys else name}"
        if isinstance(value, (int, str)):
            raise ConfigError(key, f"is {value} for this model, but {path} has {name}={was}; take that")
        note_once(f"{key}: {path} has {name}={was}, and it is {value} now")


def args_of(weights: WeightFolder, spec: ModelSpec) -> Any:
    """The hyper-parameters that the folder tells; ConfigError for what the family does not compute."""
    try:
        return from_config(spec, weights.config)
    except ConfigError as error:
        raise ConfigError(error.key, f"{weights.folder}: {error.problem}") from None


@dataclass(frozen=True)
class _Place:
    """Where a parameter of ours lies: in a tensor of theirs, which holds ``stored``."""

    name: str
    stored: Stored


class Source:
    """Parameters of ours, by name, from tensors of theirs. ``shapes`` are those of the whole model, a tied one under
    its first name.

    CheckpointError for a tensor that is unknown, missing, there under two names or of another shape.
    """

    def __init__(self, weights: WeightFolder, spec: ModelSpec, args: Any) -> None:
        self._weights = weights
        self._places: dict[str, list[_Place]] = {}
        self.shapes: dict[str, torch.Size] = {}
        tied = spec.tied(args)
        try:
            self._table = TensorTable(spec, args)
            for name, entry in weights.entries.items():
                stored = self._table.find(name)
                if stored is None:
                    continue
                like = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                for part, piece in self._table.load(name, like).items():
                    if part in self._places:
                        raise ConfigError(None, f"{name} is there as {self._places[part][0].name} as well; drop one")
                    self._places[part] = [_Place(name, stored)]
                    self.shapes[tied.get(part, part)] = piece.shape
            for second, first in tied.items():
                # Either is enough; of two, the second is compared with the first.
                self._places[first] = self._places.get(first, []) + self._places.pop(second, [])
            self._table.check_complete({part: places for part, places in self._places.items() if places})
        except ConfigError as error:
            raise CheckpointError(f"{weights.folder}: {error.problem}") from None

    def dtypes(self, name: str) -> set[torch.dtype]:
        """What the parameter ``name`` is stored as."""
        return {self._weights.entries[place.name].dtype for place in self._places[name]}

    def place(self, name: str) -> tuple[Path, str]:
        """Sorts parameters as they lie in the files."""
        first = self._places[name][0]
        return self._weights.entries[first.name].file, first.name

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill what this rank holds of the whole parameter ``name``, in the type of ``tensor``."""
        from torchtitan.distributed.gradients import local_part  # a folder is looked at without it

        first, *copies = self._places[name]
        for offsets, sizes in _held(tensor):
            part = self._read(first, name, offsets, sizes)
            for copy in copies:
                other = self._read(copy, name, offsets, sizes)
                wide = torch.promote_types(part.dtype, other.dtype)
                if not torch.equal(part.to(wide), other.to(wide)):
                    raise CheckpointError(
                        f"{self._weights.folder}: the model is tied, but {copy.name} is not what {first.name} is"
                    )
            local_part(tensor).copy_(part)

    def _read(self, place: _Place, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        form = place.stored.form
        box = [slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        if len(place.stored.parts) > 1 or not isinstance(form, (AsItIs, RotaryHalves)):
            return self._table.load(place.name, self._weights.read(place.name))[self._part(place, name)][tuple(box)]
        # Rows move within a head at most: whole heads are enough.
        rows = form.head_dim if isinstance(form, RotaryHalves) else 1
        begin = box[0].start // rows * rows
        end = -(-box[0].stop // rows) * rows
        heads = form.load(self._weights.read(place.name, [slice(begin, end), *box[1:]]))
        return heads[box[0].start - begin : box[0].stop - begin]

    def _part(self, place: _Place, name: str) -> str:
        """The name under which a tensor of theirs holds the parameter: its own, or that of the one tied to it."""
        return name if name in place.stored.parts else next(iter(place.stored.parts))


def _held(tensor: Tensor) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    from torch.distributed.tensor import DTensor

    from torchtitan.distributed.whole import boxes

    if isinstance(tensor, DTensor):
        yield from boxes(tensor)
    elif tensor.numel():
        yield [0] * tensor.dim(), tensor.shape
