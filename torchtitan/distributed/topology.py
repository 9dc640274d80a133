"""Degrees as plain integers, and the device meshes that they stand for.

What is done over a mesh is in the files named after each parallelism.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError, divisors

# Field of Degrees → key of the configuration, outermost axis first: ranks of an inner axis stand closer together.
KEYS = {
    "pipeline": "parallelism.pipeline_parallel_degree",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "context": "parallelism.context_parallel_degree",
    "tensor": "parallelism.tensor_parallel_degree",
}


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis takes; their product is the world. ``shard`` may be -1: whatever is left.

    Rank r has the place that its digits spell, written with the axes in the order of ``KEYS``, tensor counting
    fastest: with pipeline 2 × shard 2 × tensor 2, ranks 0 and 1 are tensor peers, 0 and 2 shard a copy of the first
    stage, 0 and 4 hold its first and its second stage.
    """

    replicate: int = 1
    shard: int = -1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def resolve(self, world_size: int) -> "Degrees":
        """The same with every degree a number. ConfigError if no product gives ``world_size``."""
        fixed = {axis: getattr(self, axis) for axis in KEYS if axis != "shard"}
        named = {axis: degree for axis, degree in fixed.items() if degree > 1}
        taken = math.prod(fixed.values())
        if self.shard == -1:
            if world_size % taken == 0:
                return replace(self, shard=world_size // taken)
            if len(named) == 1:
                ((axis, degree),) = named.items()
                if degree > world_size:
                    there = "there is 1 process" if world_size == 1 else f"there are {world_size} processes"
                    raise ConfigError(KEYS[axis], f"{there}; start {degree} or a multiple of that (NGPU)")
                raise ConfigError(
                    KEYS[axis], f"{degree} does not divide the {world_size} processes; try {divisors(world_size)}"
                )
            axis = max(named, key=lambda name: named[name])
            raise ConfigError(
                KEYS[axis],
                f"{_product(named)} = {taken} does not divide the {world_size} processes; start a multiple of {taken} "
                "(NGPU) or lower a degree",
            )
        if self.shard * taken != world_size:
            named = {axis: getattr(self, axis) for axis in KEYS if axis == "shard" or axis in named}
            raise ConfigError(
                KEYS["shard"],
                f"{_product(named)} = {self.shard * taken} ranks, but there are {world_size} processes; start "
                f"{self.shard * taken} (NGPU) or leave it at -1",
            )
        return self

    @property
    def readers(self) -> int:
        """Number of groups of ranks that read rows of their own; all ranks of a group read the same rows."""
        return self.replicate * self.shard

    @property
    def copies(self) -> int:
        """Number of ranks that read the same rows."""
        return self.pipeline * self.context * self.tensor

    def __str__(self) -> str:
        return _product({axis: getattr(self, axis) for axis in KEYS if axis == "shard" or getattr(self, axis) > 1})


def _product(degrees: dict[str, int]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items())


@dataclass(frozen=True)
class Axis:
    """Ranks that split something among them, and this rank's place in their order."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Topology:
    """The meshes of a run and this rank's place in them; None is an axis of one rank.

    ``fsdp`` has one dimension, or two (replicate, shard) when weights are replicated; one rank is a mesh too. Context
    peers hold shards of the weights as data-parallel ranks do, so it spans them as well.
    """

    degrees: Degrees
    fsdp: DeviceMesh
    tensor: DeviceMesh | None
    context: Axis | None
    pipeline: Axis | None
    reader_rank: int

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Every process group in use."""
        for mesh in (self.fsdp, self.tensor):
            if mesh is not None:
                yield from mesh.get_all_groups()
        for axis in (self.context, self.pipeline):
            if axis is not None:
                yield axis.group


def build_topology(degrees: Degrees, world: World) -> Topology:
    """Meshes for resolved ``degrees``, called by all ranks together."""
    # Weights are sharded over context peers too, so the two axes are one dimension of the mesh they live on.
    sizes = {
        "pipeline": degrees.pipeline,
        "replicate": degrees.replicate,
        "shard": degrees.shard * degrees.context,
        "tensor": degrees.tensor,
    }
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    mesh = init_device_mesh(world.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    place = _place(degrees, world.rank)
    return Topology(
        degrees=degrees,
        fsdp=mesh[("replicate", "shard")] if degrees.replicate > 1 else mesh["shard"],
        tensor=mesh["tensor"] if degrees.tensor > 1 else None,
        context=Axis(_context_group(degrees), place["context"], degrees.context) if degrees.context > 1 else None,
        pipeline=Axis(mesh["pipeline"].get_group(), place["pipeline"], degrees.pipeline)
        if degrees.pipeline > 1
        else None,
        reader_rank=place["replicate"] * degrees.shard + place["shard"],
    )


def _place(degrees: Degrees, rank: int) -> dict[str, int]:
    """This rank's index along each axis."""
    place = {}
    for axis in reversed(KEYS):
        rank, place[axis] = divmod(rank, getattr(degrees, axis))
    return place


def _context_group(degrees: Degrees) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(context_groups(degrees))
    assert group is not None
    return group


def context_groups(degrees: Degrees) -> Sequence[list[int]]:
    """The ranks of each group of context peers."""
    span = degrees.context * degrees.tensor
    world = degrees.readers * degrees.copies
    return [
        list(range(first + inner, first + inner + span, degrees.tensor))
        for first in range(0, world, span)
        for inner in range(degrees.tensor)
    ]
