"""Files of PyTorch's distributed checkpoints: what each rank writes of a step, and the index of the whole.

Which tensors those are is in ``tensors.py``, when they are written in ``checkpointer.py``; they are read by
``reader.py``. Plans are PyTorch's; files are written here, in its format, so that one tensor at a time is in memory.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (  # where an entry of the index lies
    CURRENT_DCP_VERSION,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from upath import UPath

from torchtitan.checkpoint.places import FileRecord, RecordedFile
from torchtitan.checkpoint.storage import METADATA


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
    # PyTorch leaves this field to who writes.
    return [replace(share, storage_data=f"__{rank}_0.distcp") for rank, share in enumerate(shares)], metadata


def write_share(folder: UPath, plan: SavePlan, resolve: Resolve) -> Written:
    """Write the ``plan`` of one rank into a file in ``folder``; ``resolve`` gives the tensor of an item when its turn
    comes, which may share its memory with the one before. OSError where storage fails."""
    if not plan.items:
        return Written([], {})
    name, results = str(plan.storage_data), []
    with _without_crc32(), RecordedFile(folder / name) as file:
        for item in plan.items:
            offset = file.tell()
            torch.save(_compact(resolve(item)), cast(IO[bytes], file))
            length = file.tell() - offset
            results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
    return Written(results, {name: file.record})


def _compact(tensor: Tensor) -> Tensor:
    """On the host, without what lies around a part of something larger."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_metadata(folder: UPath, metadata: Metadata, shares: Sequence[Written]) -> dict[str, FileRecord]:
    """Write the index of a step whose ``shares`` are written; returns its file."""
    index = replace(
        metadata,
        version=CURRENT_DCP_VERSION,
        storage_data={result.index: result.storage_data for share in shares for result in share.results},
        storage_meta=StorageMeta(),
    )
    with RecordedFile(folder / METADATA) as file:
        pickle.dump(index, file)
    return {METADATA: file.record}


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


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """The SHA-256 of a file says all that the sums of its tensors would, and those cost half as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
