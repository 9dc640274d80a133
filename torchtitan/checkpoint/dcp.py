"""Files of PyTorch's distributed checkpoints: what each rank writes of a step, and any tensor read by its name.

Which tensors those are is in ``tensors.py``; when they are written, in ``saver.py``. Nothing read here can run code:
the index is a pickle of which only the classes of an index are let in, and values are read as tensors.
"""

import contextlib
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from upath import UPath

from torchtitan.checkpoint.manifest import CheckpointError
from torchtitan.checkpoint.places import FileRecord, is_local, one_line, storage_errors
from torchtitan.checkpoint.storage import METADATA


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

    CheckpointError where the step cannot be read.
    """

    def __init__(self, folder: UPath) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        entries = self._reader.metadata.state_dict_metadata
        self.tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        """What is said of each tensor: ``size``, and ``properties.dtype``."""
        self.values = {name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)}
        """Names of entries that are no tensors."""

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors of the stored shape, plain or spread over ranks, which then get their part."""
        metadata = self._reader.metadata
        planner = dcp.DefaultLoadPlanner()
        try:
            planner.set_up_planner(dict(into), metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            (plan,) = planner.create_global_plan([planner.create_local_plan()])
            with storage_errors(self.folder):
                self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # anything may come out of damaged files
            raise CheckpointError(f"{self.folder} cannot be read: {one_line(error)}") from error

    def tensor(self, name: str) -> Tensor:
        """The whole of one tensor, on the host."""
        entry = self.tensors[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read({name: whole})
        return whole

    def value(self, name: str) -> Any:
        """One entry that is no tensor: a number, a string, or a table of such. Anything else is a CheckpointError."""
        info = self._reader.metadata.storage_data[MetadataIndex(name)]
        try:
            with storage_errors(self.folder), (self.folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        except Exception as error:  # whatever a damaged or strange file makes of it
            raise CheckpointError(f"{name} in {self.folder} cannot be read: {one_line(error)}") from error


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


class _Reader(dcp.FileSystemReader):
    fs: Any
    path: Any

    def __init__(self, folder: UPath) -> None:
        super().__init__(".")
        self.fs, self.path = Streams(), folder
        try:
            with storage_errors(folder), (folder / METADATA).open("rb") as file:
                self.metadata: Metadata = _IndexUnpickler(file).load()
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is no checkpoint: it has no {METADATA}") from None
        except Exception as error:  # anything may come out of a damaged pickle
            raise CheckpointError(f"{folder / METADATA} cannot be read: {one_line(error)}") from error
        if not isinstance(self.metadata, Metadata):
            raise CheckpointError(f"{folder / METADATA} is not the index of a checkpoint")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _IndexUnpickler(pickle.Unpickler):
    """Lets in what the index of a checkpoint is made of, and nothing that could do anything."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
                    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath  # where it was written
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into the index of a checkpoint")
        return super().find_class(module, name)


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """The SHA-256 of a file says all that the sums of its tensors would, and those cost half as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
