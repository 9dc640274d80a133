"""Degrees: what fits a world, what does not and what is said of it; which ranks an axis joins."""

import pytest
import torch.distributed as dist

from tests.launch import run_ranks
from torchtitan.distributed.topology import KEYS, Degrees, build_topology, context_groups
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError


@pytest.mark.parametrize(
    ("degrees", "world", "shard"),
    [
        (Degrees(), 1, 1),
        (Degrees(), 6, 6),
        (Degrees(replicate=2), 6, 3),
        (Degrees(replicate=6), 6, 1),
        (Degrees(replicate=2, shard=3), 6, 3),
        (Degrees(tensor=8), 8, 1),
        (Degrees(tensor=2, context=2, pipeline=2), 16, 2),
        (Degrees(replicate=2, shard=2, tensor=2, context=2, pipeline=2), 32, 2),
    ],
)
def test_degrees_that_fit(degrees: Degrees, world: int, shard: int) -> None:
    resolved = degrees.resolve(world)
    assert resolved.shard == shard
    assert resolved.readers * resolved.copies == world


@pytest.mark.parametrize(
    ("degrees", "world", "axis", "said"),
    [
        (Degrees(replicate=4), 6, "replicate", "4 does not divide the 6 processes; try 1, 2, 3, 6"),
        (Degrees(tensor=2), 1, "tensor", r"there is 1 process; start 2 or a multiple of that \(NGPU\)"),
        (Degrees(context=4), 3, "context", "there are 3 processes; start 4"),
        (Degrees(tensor=3), 8, "tensor", "3 does not divide the 8 processes; try 1, 2, 4, 8"),
        (
            Degrees(tensor=4, pipeline=2),
            4,
            "tensor",
            r"pipeline 2 × tensor 4 = 8 does not divide the 4 .* multiple of 8",
        ),
        (Degrees(shard=4), 6, "shard", "shard 4 = 4 ranks, but there are 6 processes; start 4"),
        (Degrees(replicate=2, shard=4), 4, "shard", "replicate 2 × shard 4 = 8 ranks"),
        (Degrees(shard=1, context=2, tensor=2), 2, "shard", "shard 1 × context 2 × tensor 2 = 4 ranks"),
    ],
)
def test_degrees_that_do_not(degrees: Degrees, world: int, axis: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        degrees.resolve(world)
    assert refused.value.key == KEYS[axis]


def test_context_peers_stand_a_tensor_degree_apart() -> None:
    assert context_groups(Degrees(shard=1, context=2, tensor=2, pipeline=2)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert context_groups(Degrees(shard=2, context=2)) == [[0, 1], [2, 3]]


def places(world: World) -> list[object]:
    plain = [build_topology(Degrees(*pair), world) for pair in ((1, 8), (2, 4), (8, 1))]
    full = build_topology(Degrees(shard=1, context=2, tensor=2, pipeline=2), world)
    wide = build_topology(Degrees(replicate=2, shard=2, tensor=2), world)
    assert full.tensor is not None and full.context is not None and full.pipeline is not None
    assert (plain[0].tensor, plain[0].context, plain[0].pipeline) == (None, None, None)
    return [
        [(tuple(t.fsdp.mesh.shape), t.reader_rank) for t in plain],
        {
            "fsdp": full.fsdp.mesh.tolist(),
            "tensor": full.tensor.mesh.tolist(),
            "context": (dist.get_process_group_ranks(full.context.group), full.context.rank),
            "pipeline": (dist.get_process_group_ranks(full.pipeline.group), full.pipeline.rank),
            "reader": full.reader_rank,
        },
        (wide.fsdp.mesh.tolist(), wide.reader_rank),
        len(list(full.groups())),
    ]


def test_the_picture_of_ranks() -> None:
    results = run_ranks(places, 8)
    for rank, (plain, _, _, groups) in enumerate(results):
        assert plain == [((8,), rank), ((2, 4), rank), ((8, 1), rank)], "replicas are a second dimension"
        assert groups == 4
    # Rank 6 of pipeline 2 × shard 1 × context 2 × tensor 2 is 1·4 + 0·4 + 1·2 + 0.
    assert results[6][1] == {
        "fsdp": [4, 6],
        "tensor": [6, 7],
        "context": ([4, 6], 1),
        "pipeline": ([2, 6], 1),
        "reader": 0,
    }
    # Rank 5 of replicate 2 × shard 2 × tensor 2 is 1·4 + 0·2 + 1.
    assert results[5][2] == ([[1, 3], [5, 7]], 2)
