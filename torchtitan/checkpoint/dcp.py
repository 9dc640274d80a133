"""Files of PyTorch's distributed checkpoints: what each rank writes of a step, and any tensor read by its name.

Which tensors those are is in ``tensors.py``; when they are written, in ``saver.py``. Nothing read here can run code:
of the index see ``index.py``, and everything else is read as tensors and plain values.
"""

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from upath import UPath

from torchtitan.checkpoint.index import Index, readable
from torchtitan.checkpoint.manifest import CheckpointError
from torchtitan.checkpoint.places import FileRecord, is_local, storage_errors
from torchtitan.checkpoint.storage import METADATA

# Top-level keys of other parts in checkpoints of TorchTitan, which stand beside the model's.
_NO_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


class Streams(FileSystemBase):
    """The file system of PyTorch's checkpoint readers and writers. ``records`` are the files written through it, each
    flushed to the disk once, when it was whole."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with storage_errors(path), path.open(mode) as file:
            if "w" not in mode:
                yield file
                return
            stream = _Recorded(file, on_disk=is_local(path))
            try:
                yield stream
                stream.close()
            except Exception:
                if stream.failure is not None:  # what torch makes of it does not say what it was
                    raise stream.failure from None
                raise
        self.records[path.name] = FileRecord(stream.size, stream.digest.hexdigest())

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()

    def rename(self, path: Any, new_path: Any) -> None:
        with storage_errors(path):
            path.rename(new_path)
        self.records[new_path.name] = self.records.pop(path.name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, UPath)


class _Recorded:
    """A file that is written from front to end: its hash, and what went wrong with it."""

    def __init__(self, file: BinaryIO, *, on_disk: bool) -> None:
        self._file, self._on_disk = file, on_disk
        self.digest, self.size = hashlib.sha256(), 0
        self.failure: Exception | None = None

    def write(self, block: Any) -> int:
        with self._failures():
            self._file.write(block)
        self.digest.update(block)
        length = memoryview(block).nbytes
        self.size += length
        return length

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Not at every tensor: once, in the end."""

    def close(self) -> None:
        if self._file.closed:
            return
        with self._failures():
            self._file.flush()
            if self._on_disk:
                os.fsync(self._file.fileno())
            self._file.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise


@dataclass(frozen=True)
class Written:
    """What one rank has written: where each of its tensors lies, and its files by name."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


Resolve = Callable[[WriteItem], Tensor]
"""The tensor that an item of a plan stands for."""


def local_plan(state: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> tuple[SavePlan, Resolve]:
    """What this rank holds of ``state``, tensors by name, tables of them under ``name.``; floating-point ones are to be
    stored as ``dtype`` if given."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    plan = planner.create_local_plan()
    if dtype is not None:
        plan = replace(plan, items=[_stored_as(item, dtype) for item in plan.items])

    def resolve(item: WriteItem) -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor), "only tensors are saved"
        return tensor.detach().to(_data(item).properties.dtype)

    return plan, resolve


def _stored_as(item: WriteItem, dtype: torch.dtype) -> WriteItem:
    data = _data(item)
    if not data.properties.dtype.is_floating_point:
        return item
    return replace(item, tensor_data=replace(data, properties=replace(data.properties, dtype=dtype)))


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "only tensors are saved"
    return item.tensor_data


def nbytes(plan: SavePlan) -> int:
    """Size of the tensors of a plan."""
    return sum(_data(item).chunk.sizes.numel() * _data(item).properties.dtype.itemsize for item in plan.items)


def global_plans(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Who writes what, from what the ranks hold: each piece once; and the index that belongs to it."""
    planner = dcp.DefaultSavePlanner()
    shares, metadata = planner.create_global_plan(list(plans))
    return _Writer(UPath("."), Streams()).prepare_global_plan(shares), metadata


def write_share(folder: UPath, plan: SavePlan, resolve: Resolve) -> Written:
    """Write one rank's ``plan`` into ``folder``; ``resolve`` gives the tensor of an item when its turn comes, so that
    one at a time is in memory. OSError where storage fails."""
    streams = Streams()
    writer = _Writer(folder, streams)
    if not plan.items:
        return Written([], {})
    with _without_crc32():
        results = writer.write_data(plan, _Resolving(resolve)).value()
    return Written(results, streams.records)


def write_metadata(folder: UPath, metadata: Metadata, shares: Sequence[Written]) -> dict[str, FileRecord]:
    """Write the index of a step whose ``shares`` are written; returns its file."""
    streams = Streams()
    _Writer(folder, streams).finish(metadata, [share.results for share in shares])
    return streams.records


def write_lazily(
    folder: UPath, shapes: Mapping[str, torch.Size], dtype: torch.dtype, load: Callable[[str], Tensor]
) -> dict[str, FileRecord]:
    """Write a whole checkpoint from one process: tensors of ``shapes``, each loaded by its name when its turn comes.

    Turns come in the order of the names. Returns the files.
    """
    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    (plan,), metadata = global_plans([local_plan(state)[0]])
    written = write_share(folder, plan, lambda item: load(item.index.fqn))
    return written.files | write_metadata(folder, metadata, [written])


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


class _Writer(dcp.FileSystemWriter):
    fs: Any
    path: Any

    def __init__(self, folder: UPath, streams: Streams) -> None:
        # Copied ahead, tensors would go through the current device of the thread that writes, which is another one.
        super().__init__(".", sync_files=False, per_thread_copy_ahead=0)
        self.fs, self.path = streams, folder

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # a path would be one of this machine, and pickled


class _Resolving(dcp.DefaultSavePlanner):
    def __init__(self, resolve: Resolve) -> None:
        super().__init__()
        self.resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.resolve(write_item)


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """The SHA-256 of a file says all that the sums of its tensors would, and those cost half as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
