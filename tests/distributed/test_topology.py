"""Degrees: what fits a world, what does not, and what is said of it."""

import pytest

from tests.launch import run_ranks
from torchtitan.distributed.topology import Degrees, build_topology
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "resolved"),
    [
        (1, -1, 1, (1, 1)),
        (1, -1, 6, (1, 6)),
        (2, -1, 6, (2, 3)),
        (6, -1, 6, (6, 1)),
        (2, 3, 6, (2, 3)),
        (1, 6, 6, (1, 6)),
    ],
)
def test_degrees_that_fit(replicate: int, shard: int, world: int, resolved: tuple[int, int]) -> None:
    degrees = Degrees(replicate, shard).resolve(world)
    assert (degrees.replicate, degrees.shard) == resolved
    assert degrees.data_parallel == world


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "key", "said"),
    [
        (4, -1, 6, "parallelism.data_parallel_replicate_degree", "try 1, 2, 3, 6"),
        (1, 4, 6, "parallelism.data_parallel_shard_degree", "start 4"),
        (2, 4, 4, "parallelism.data_parallel_shard_degree", "2 × shard 4 = 8 ranks"),
    ],
)
def test_degrees_that_do_not(replicate: int, shard: int, world: int, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Degrees(replicate, shard).resolve(world)
    assert refused.value.key == key


def meshes(world: World) -> list[tuple[int, ...]]:
    layouts = ((1, 4), (2, 2), (4, 1))
    return [(*build_topology(Degrees(*pair), world).fsdp.mesh.shape, world.rank) for pair in layouts]


def test_meshes_have_a_second_dimension_only_for_replicas() -> None:
    for rank, shapes in enumerate(run_ranks(meshes, 4)):
        assert shapes == [(4, rank), (2, 2, rank), (4, 1, rank)]
