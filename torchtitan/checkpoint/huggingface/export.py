"""The weights of a step as a Hugging Face folder: which file is to hold what, and the files, by as many ranks as like.

What holds what is told in ``models/huggingface.py``; such a folder is read by ``files.py``.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from upath import UPath

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.dcp.writer import Written
from torchtitan.checkpoint.huggingface.files import CONFIG, DTYPES, INDEX_SUFFIX, SUFFIX
from torchtitan.checkpoint.places import FileRecord, RecordedFile, share
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.log import logger
from torchtitan.models.huggingface import TensorTable, to_config
from torchtitan.models.spec import ModelSpec

SHARD_BYTES = 2 * 10**9
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "generation_config.json"),
)
"""What is copied of a folder of a tokenizer, as far as it is there."""
_BLOCK = 16 << 20


@dataclass(frozen=True)
class ExportPlan:
    """``files`` tells which tensors of theirs each file holds, ``tensors`` their shapes and types, ``config`` what
    stands in config.json. The same on every rank that plans the same."""

    files: Mapping[str, Sequence[str]]
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    config: Mapping[str, Any]
    table: TensorTable

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(self.bytes_of(name) for name in self.tensors)

    def bytes_of(self, name: str) -> int:
        shape, dtype = self.tensors[name]
        return shape.numel() * dtype.itemsize


def export_plan(
    spec: ModelSpec, args: Any, reader: Reader, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> ExportPlan:
    """How the weights of a step of a model of ``args`` are written as ``dtype`` (None: as they are stored), in files of
    at most ``shard_bytes``, but for a tensor that is larger. Nothing is read but the step's index.

    CheckpointError where the step does not hold such a model, ConfigError where the family has no twin.
    """
    table = TensorTable(spec, args)
    metas = {
        name: torch.empty(reader.tensors[name].size, dtype=reader.tensors[name].properties.dtype, device="meta")
        for name in reader.weights
    }
    parts = {part for stored in (table.stored | table.optional).values() for part in stored.parts}
    if unknown := sorted(set(metas) - parts):
        raise CheckpointError(f"{reader.folder} holds {unknown[0]}, which such a model has not; check model.args")
    tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name in table.stored:
        try:
            tensor = table.store(name, metas)
        except ConfigError as error:
            raise CheckpointError(f"{reader.folder}: {error.problem}; check model.args") from None
        tensors[name] = tensor.shape, dtype or tensor.dtype
    kinds = {kind for _, kind in tensors.values()}
    kind = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
    # Version 4 of transformers reads the one, version 5 the other.
    config = to_config(spec, args) | {"torch_dtype": kind, "dtype": kind}
    return ExportPlan(_files(tensors, shard_bytes), tensors, config, table)


def _files(tensors: Mapping[str, tuple[torch.Size, torch.dtype]], shard_bytes: int) -> dict[str, list[str]]:
    shards: list[list[str]] = []
    room = 0
    for name, (shape, dtype) in tensors.items():
        size = shape.numel() * dtype.itemsize
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {f"model{SUFFIX}": shards[0]}
    return {f"model-{n:05}-of-{len(shards):05}{SUFFIX}": names for n, names in enumerate(shards, start=1)}


class Overflow:
    """Looks for values that a cast to float16 made infinite, and warns of the first tensor that has one."""

    def __init__(self) -> None:
        self._told = False

    def look(self, name: str, tensor: Tensor, cast: Tensor) -> None:
        if self._told or cast.dtype is not torch.float16 or tensor.dtype is torch.float16:
            return
        if (cast.isinf() & ~tensor.isinf()).any():
            self._told = True
            logger.warning(f"{name} has values beyond float16, which become infinite; take bfloat16 or float32")


class ExportContent:
    """The weights of a complete step as a Hugging Face folder, each of its files written by one of ``ranks``."""

    def __init__(self, plan: ExportPlan, reader: Reader, *, tokenizer: Path | None, rank: int, ranks: int) -> None:
        self._plan, self._reader, self._tokenizer = plan, reader, tokenizer
        self._mine = share(plan.files, rank, ranks)

    @property
    def bytes(self) -> int:
        return sum(self._plan.bytes_of(name) for file in self._mine for name in self._plan.files[file])

    def begin(self, folder: UPath) -> Callable[[], Written]:
        return lambda: Written([], write_files(self._plan, self._reader, folder, self._mine))

    def complete(self, folder: UPath, shares: Sequence[Written]) -> Mapping[str, FileRecord]:
        return write_rest(self._plan, folder, self._tokenizer)


def write_files(
    plan: ExportPlan,
    reader: Reader,
    folder: UPath,
    which: Iterable[str],
    *,
    wrote: Callable[[int], object] = lambda bytes: None,
) -> dict[str, FileRecord]:
    """Write ``which`` of the plan's files into ``folder``, one tensor in memory at a time, and return what they are;
    ``wrote`` is told of the bytes of each tensor. No other rank is waited for.

    OSError where storage fails, CheckpointError where the step cannot be read.
    """
    overflow = Overflow()

    def load(name: str) -> Tensor:
        stored = plan.table.stored[name]
        tensor = plan.table.store(name, {part: reader.tensor(part) for part in stored.parts})
        cast = tensor.to(plan.tensors[name][1])
        overflow.look(name, tensor, cast)
        wrote(plan.bytes_of(name))
        return cast

    return {
        file: write_weights(folder / file, {name: plan.tensors[name] for name in plan.files[file]}, load)
        for file in which
    }


def write_rest(plan: ExportPlan, folder: UPath, tokenizer: Path | None = None) -> dict[str, FileRecord]:
    """What one rank writes beside the weights: config.json, the index where there are several files, and those files of
    the folder ``tokenizer`` that others look for. OSError where storage fails."""
    contents: dict[str, bytes] = {CONFIG: _json(plan.config)}
    if len(plan.files) > 1:
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        index = {"metadata": {"total_size": plan.bytes}, "weight_map": weight_map}
        contents[f"model{INDEX_SUFFIX}"] = _json(index)
    if tokenizer is not None:
        found = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
        contents |= {path.name: path.read_bytes() for path in found}
    return {name: write_file(folder / name, [content]) for name, content in contents.items()}


def write_weights(
    path: UPath, tensors: Mapping[str, tuple[torch.Size, torch.dtype]], load: Callable[[str], Tensor]
) -> FileRecord:
    """Write a safetensors file of ``tensors``, each loaded by its name when its turn comes, so that one at a time is in
    memory. OSError where storage fails."""
    # The widest first, so that each lies where its numbers may be used in place.
    order = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype = tensors[name]
        begin, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_file(
        path, (struct.pack("<Q", len(text)), text), *(_bytes_of(load, name, tensors[name]) for name in order)
    )


def write_file(path: UPath, *contents: Iterable[Any]) -> FileRecord:
    """Write blocks of bytes, and wait until they are on the disk. OSError where storage fails."""
    with RecordedFile(path) as file:
        for content in contents:
            for block in content:
                file.write(block)
    return file.record


def _bytes_of(load: Callable[[str], Tensor], name: str, kind: tuple[torch.Size, torch.dtype]) -> Iterable[Any]:
    tensor = load(name)
    assert (tensor.shape, tensor.dtype) == kind, f"{name} is not what was said of it"
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(content), _BLOCK):
        yield content[begin : begin + _BLOCK]


def _json(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2) + "\n").encode()
