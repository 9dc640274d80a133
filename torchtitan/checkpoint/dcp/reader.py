"""Any tensor of a distributed checkpoint by its name, ours or another program's.

Nothing read here can run code: of the index see ``index.py``, and everything else is read as tensors and plain values.
"""

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from upath import UPath

from torchtitan.checkpoint.dcp.index import Index, readable
from torchtitan.checkpoint.storage import METADATA
from torchtitan.errors import CheckpointError

# Top-level keys of other parts in checkpoints of TorchTitan, which stand beside the model's.
_NO_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


class Reader:
    """Tensors of one step, ours or another program's, by name; used by each rank for itself.

    Nothing in it is believed: what its index says fits together (CheckpointError if not), and what is read is what the
    index says.
    """

    def __init__(self, folder: UPath) -> None:
        self.folder = folder
        self.index = Index(folder)
        self.tensors = self.index.tensors()
        """What is said of each tensor: ``size``, and ``properties.dtype``."""
        self.values = self.index.values()
        """Names of entries that are no tensors."""

    @property
    def weights(self) -> list[str]:
        """Names of the tensors that are the model's."""
        return [name for name in self.tensors if not name.startswith(_NO_WEIGHTS)]

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors of the stored shape, plain or spread over ranks, which then get their part."""
        if missing := next((name for name in into if name not in self.tensors), None):
            raise CheckpointError(f"{self.folder} holds no tensor {missing}")
        planner = dcp.DefaultLoadPlanner()
        with readable(self.folder):
            planner.set_up_planner(dict(into), self.index.metadata, is_coordinator=True)
            items = planner.create_local_plan().items
            for item, stored in self.index.stored([(item, item.storage_index) for item in items]):
                piece = self._tensor_in(stored, item.storage_index)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    piece = piece.narrow(dim, start, length)
                planner.resolve_tensor(item).detach().copy_(piece)

    def tensor(self, name: str) -> Tensor:
        """The whole of one tensor, on the host."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        entry = self.tensors[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read({name: whole})
        return whole

    def value(self, name: str) -> Any:
        """One entry that is no tensor: a number, a string, or a table of such. Anything else is a CheckpointError."""
        return self.read_values([name])[name]

    def read_values(self, names: Iterable[str]) -> dict[str, Any]:
        """Several entries that are no tensors, each file opened once."""
        wanted = [(name, MetadataIndex(name)) for name in names]
        if missing := next((name for name, _ in wanted if name not in self.values), None):
            raise CheckpointError(f"{self.folder} holds no value {missing}")
        return {name: self._load(stored, name) for name, stored in self.index.stored(wanted)}

    def _tensor_in(self, stored: BinaryIO, key: MetadataIndex) -> Tensor:
        entry, piece = self.tensors[key.fqn], self._load(stored, key.fqn)
        assert key.index is not None, "torch tells which piece it means"
        expected = entry.chunks[key.index].sizes
        plain = isinstance(piece, Tensor) and piece.layout is torch.strided and piece.device.type == "cpu"
        if not plain or piece.shape != expected or piece.dtype != entry.properties.dtype:
            held = f"{piece.dtype} {list(piece.shape)}" if plain else f"{type(piece).__name__} of another kind"
            said = f"{entry.properties.dtype} {list(expected)}"
            raise CheckpointError(f"{key.fqn} in {self.folder} is a {held}, its {METADATA} says {said}")
        return piece.detach()

    def _load(self, stored: BinaryIO, name: str) -> Any:
        with readable(f"{name} in {self.folder}"):
            try:
                return torch.load(stored, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:  # what torch says of it is how to run it all the same
                problem = f"{name} in {self.folder} is damaged, or holds more than tensors and plain values"
                raise CheckpointError(problem) from error
