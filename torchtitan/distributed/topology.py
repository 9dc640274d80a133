"""Degrees as plain integers, and the device meshes that they stand for.

What is done over a mesh is in the files named after each parallelism.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError, divisors


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis takes; their product is the world. ``shard`` may be -1: whatever is left."""

    replicate: int = 1
    shard: int = -1

    def resolve(self, world_size: int) -> "Degrees":
        """The same with every degree a number. ConfigError if no product gives ``world_size``."""
        if self.shard == -1:
            if world_size % self.replicate:
                raise ConfigError(
                    "parallelism.data_parallel_replicate_degree",
                    f"{self.replicate} does not divide the {world_size} processes; try {divisors(world_size)}",
                )
            return Degrees(self.replicate, world_size // self.replicate)
        if self.replicate * self.shard != world_size:
            raise ConfigError(
                "parallelism.data_parallel_shard_degree",
                f"replicate {self.replicate} × shard {self.shard} = {self.replicate * self.shard} ranks, but there are "
                f"{world_size} processes; start {self.replicate * self.shard} (NGPU) or leave it at -1",
            )
        return self

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read rows of their own."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Topology:
    """The meshes of a run and this rank's place in them.

    ``fsdp`` has one dimension, or two (replicate, shard) when weights are replicated; one rank is a mesh too.
    """

    fsdp: DeviceMesh
    reader_rank: int
    readers: int


def build_topology(degrees: Degrees, world: World) -> Topology:
    """Meshes for resolved ``degrees``: ranks that follow each other share a shard group."""
    device = world.device.type
    if degrees.replicate > 1:
        mesh = init_device_mesh(device, (degrees.replicate, degrees.shard), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (degrees.shard,), mesh_dim_names=("shard",))
    return Topology(fsdp=mesh, reader_rank=world.rank, readers=degrees.data_parallel)
