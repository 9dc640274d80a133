"""The index of a distributed checkpoint (``.metadata``): read without running anything, and held against itself.

What the bytes mean that it points to is read in ``reader.py``. The index is a pickle, of which only the classes of an
index are let in; what they then say is believed no further than it fits together.
"""

import contextlib
import io
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from upath import UPath

from torchtitan.checkpoint.places import is_file_name, is_local, storage_errors
from torchtitan.checkpoint.storage import METADATA
from torchtitan.errors import CheckpointError, one_line

_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """Where something lies: ``length`` bytes from ``offset`` on in a file of the folder."""

    file: str
    offset: int
    length: int


class Part(io.RawIOBase):
    """The bytes of one entry, as a file of their own."""

    def __init__(self, file: BinaryIO, entry: Entry) -> None:
        self._file, self._entry, self._at = file, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._entry.length - self._at))
        self._file.seek(self._entry.offset + self._at)
        read = self._file.readinto(view[:length])  # type: ignore[attr-defined]
        self._at += read
        return int(read)


@contextlib.contextmanager
def readable(what: object) -> Iterator[None]:
    """Anything may come out of damaged files and of storages that fail: within, it is a CheckpointError on ``what``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {one_line(error)}") from error


class Index:
    """What the step in ``folder`` holds, and where. CheckpointError where it is unreadable or does not fit together."""

    def __init__(self, folder: UPath) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            with storage_errors(folder), path.open("rb") as file:
                self.metadata: Metadata = _Unpickler(file).load()
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is no checkpoint: it has no {METADATA}") from None
        except Exception as error:  # anything may come out of a damaged pickle
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error
        try:
            problem = next(self._problems(), None)
        except (AttributeError, TypeError, ValueError) as error:  # a class of an index that holds something else
            problem = f"it is not put together like one ({one_line(error)})"
        if problem is not None:
            raise CheckpointError(f"{path} is not the index of a checkpoint: {problem}")

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        entries = self.metadata.state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def values(self) -> set[str]:
        """Names of entries that are no tensors."""
        entries = self.metadata.state_dict_metadata
        return {name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)}

    def entry(self, key: MetadataIndex) -> Entry:
        info = self.metadata.storage_data[key]
        return Entry(info.relative_path, info.offset, info.length)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Name and place of each piece of each tensor, and of each value."""
        return ((key.fqn, self.entry(key)) for key in self.metadata.storage_data)

    def stored(self, wanted: Iterable[tuple[_T, MetadataIndex]]) -> Iterator[tuple[_T, BinaryIO]]:
        """Each of ``wanted`` with its bytes, in the order in which they lie; each file opened once."""
        files: dict[str, list[tuple[_T, Entry, str]]] = {}
        for what, key in wanted:
            entry = self.entry(key)
            files.setdefault(entry.file, []).append((what, entry, key.fqn))
        for name, parts in files.items():
            path = self.folder / name
            with readable(path):
                file = path.open("rb")
            with file:
                with readable(path):
                    size = file.seek(0, os.SEEK_END)
                for what, entry, fqn in sorted(parts, key=lambda part: part[1].offset):
                    if entry.offset + entry.length > size:
                        raise CheckpointError(f"{path} has {size} bytes, and {fqn} is said to lie beyond them")
                    if is_local(path):
                        yield what, cast(BinaryIO, Part(file, entry))
                        continue
                    with readable(path):  # asked for in one piece, a piece after the other
                        file.seek(entry.offset)
                        content = file.read(entry.length)
                    yield what, io.BytesIO(content)

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.metadata, Metadata):
            yield f"it holds a {type(self.metadata).__name__}"
            return
        named, stored = self.metadata.state_dict_metadata, self.metadata.storage_data
        if not isinstance(named, dict) or not isinstance(stored, dict):
            yield "it lists nothing"
            return
        for key, info in stored.items():
            if not isinstance(key, MetadataIndex) or not _is_name(key.fqn):
                yield f"it places {key!r}"
            elif not is_file_name(info.relative_path):
                yield f"{key.fqn} is said to lie in {info.relative_path!r}, which is no file of its folder"
            elif not _is_count(info.offset) or not _is_count(info.length):
                yield f"{key.fqn} is said to be {info.length!r} bytes from {info.offset!r} on"
            elif info.transform_descriptors:
                yield f"{key.fqn} is stored as {info.transform_descriptors!r}, which is not read here"
        for name, entry in named.items():
            if not _is_name(name):
                yield f"{name!r} is no name"
            elif isinstance(entry, TensorStorageMetadata):
                yield from (f"{name} {problem}" for problem in self._problems_of_tensor(name, entry))
            elif isinstance(entry, BytesStorageMetadata):
                if MetadataIndex(name) not in stored:
                    yield f"it does not say where {name} lies"
            else:
                yield f"{name} is a {type(entry).__name__}"

    def _problems_of_tensor(self, name: str, entry: TensorStorageMetadata) -> Iterator[str]:
        dtype, whole = entry.properties.dtype, entry.size
        if not isinstance(dtype, torch.dtype) or not _is_shape(whole):
            yield f"is said to be a {dtype!r} of shape {whole!r}"
            return
        filled, seen = 0, set()
        for chunk in entry.chunks:
            if not _fits(chunk, whole):
                yield f"has a piece {chunk!r}, which lies outside of its shape {list(whole)}"
                return
            numbers = math.prod(chunk.sizes)
            if not numbers:
                continue  # of a rank that has nothing of it; not written
            key = MetadataIndex(name, chunk.offsets)
            if key in seen or key not in self.metadata.storage_data:
                yield f"has a piece at {list(chunk.offsets)} that lies nowhere, or twice"
                return
            seen.add(key)
            filled += numbers
            if self.metadata.storage_data[key].length < numbers * dtype.itemsize:
                yield f"is said to be {list(whole)}, for which its bytes do not suffice"
                return
        if filled != math.prod(whole):
            yield f"has pieces of {filled} elements, and its shape {list(whole)} has {math.prod(whole)}"


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable()


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, torch.Size) and all(n >= 0 for n in shape)


def _fits(chunk: Any, whole: torch.Size) -> bool:
    return (
        isinstance(chunk, ChunkStorageMetadata)
        and _is_shape(chunk.sizes)
        and _is_shape(chunk.offsets)
        and len(chunk.sizes) == len(chunk.offsets) == len(whole)
        and all(start + size <= end for start, size, end in zip(chunk.offsets, chunk.sizes, whole, strict=True))
    )


class _Unpickler(pickle.Unpickler):
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
