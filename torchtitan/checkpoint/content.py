"""What a folder is filled with: which rank writes what of it, and what rank 0 adds to make it a whole.

When that happens is in ``checkpointer.py``, how a rank writes in ``background.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from upath import UPath

from torchtitan.checkpoint.background import Writer
from torchtitan.checkpoint.dcp.writer import Resolve, Written, global_plans, local_plan, nbytes, write_metadata
from torchtitan.checkpoint.places import FileRecord
from torchtitan.distributed.world import World


class Content(Protocol):
    """Something to fill a folder with, planned by all ranks together."""

    @property
    def bytes(self) -> int:
        """What this rank is going to write."""

    def begin(self, folder: UPath) -> Callable[[], Written]:
        """Get ready; what is returned then writes this rank's files, on another thread."""

    def complete(self, folder: UPath, shares: Sequence[Written]) -> Mapping[str, FileRecord]:
        """On rank 0, once all ranks have written: add what is not any rank's; returns those files."""


@dataclass(frozen=True)
class _Plan:
    """Which tensors this rank writes of those it holds, and on rank 0 the index of all."""

    held: SavePlan
    share: SavePlan
    index: Metadata | None


class TensorContent:
    """Tensors as a distributed checkpoint; a piece that several ranks hold is written by one of them."""

    def __init__(self, plan: _Plan, resolve: Resolve, writer: Writer) -> None:
        self._plan, self._resolve, self._writer = plan, resolve, writer

    @property
    def bytes(self) -> int:
        return nbytes(self._plan.share)

    def reserve(self) -> None:
        """Get beforehand what writing will need."""
        self._writer.reserve(self._plan.share)

    def begin(self, folder: UPath) -> Callable[[], Written]:
        self._writer.prepare(self._plan.share, self._resolve)
        return lambda: self._writer.write(folder)

    def complete(self, folder: UPath, shares: Sequence[Written]) -> Mapping[str, FileRecord]:
        assert self._plan.index is not None, "rank 0 has it"
        return write_metadata(folder, self._plan.index, shares)


class Planner:
    """Plans of the same tensors, worked out once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._plans: dict[torch.dtype | None, _Plan] = {}

    def plan(self, tensors: Mapping[str, Any], writer: Writer, *, dtype: torch.dtype | None = None) -> TensorContent:
        """What is to be written of ``tensors``, floating-point ones as ``dtype`` if given. Called by all ranks."""
        held, resolve = local_plan(tensors, dtype=dtype)
        known = self._plans.get(dtype)
        (changed,) = self._world.sum([float(known is None or known.held != held)])
        if known is None or changed:
            shares, index = None, None
            if (everyones := self._world.gather_to_first(held)) is not None:
                shares, index = global_plans(everyones)
            known = self._plans[dtype] = _Plan(held, self._world.scatter(shares), index)
        return TensorContent(known, resolve, writer)
