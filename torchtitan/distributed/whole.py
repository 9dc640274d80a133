"""Whole matrices of parameters that are spread over ranks: put together, kept by one of them, and given back to all.

What is computed on them is in ``optim/``.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.distributed.gradients import local_part
from torchtitan.optim.whole import Task


def boxes(tensor: DTensor) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Offsets and sizes of what this rank holds of ``tensor``: the box that a distributed checkpoint stores, or none
    where the rank has no element."""
    for chunk in tensor.__create_chunk_list__():
        if all(chunk.sizes):
            yield chunk.offsets, chunk.sizes


def map_whole(tasks: Sequence[Task]) -> None:
    """Do each of ``tasks`` on one of the ranks that hold its parameter, replicas and tensor peers among them; called by
    all of these with the same tasks. All get the same bits. On its way a rank holds about three whole matrices at a
    time, one of which is its own; a computation needs what it needs."""
    by_mesh: defaultdict[DeviceMesh, list[Task]] = defaultdict(list)
    for task in tasks:
        by_mesh[_spread(task.parameter).device_mesh].append(task)
    for mesh, own in by_mesh.items():
        # A round lasts as long as its dearest matrix: those that cost alike belong together.
        own.sort(key=lambda task: -task.cost)
        for first in range(0, len(own), mesh.size()):
            _round(mesh, own[first : first + mesh.size()])


def _round(mesh: DeviceMesh, tasks: Sequence[Task]) -> None:
    """A task for each rank of ``mesh``, in the order of the mesh."""
    owners = list(zip(itertools.product(*map(range, mesh.shape)), tasks, strict=False))
    here = tuple(mesh.get_coordinate() or ())
    own: dict[tuple[int, ...], Tensor] = {}  # this rank's matrix, if there is one for it
    for owner, task in owners:
        # Parameters may lie on the host, where the ranks of the mesh neither talk nor compute as fast.
        whole = _gather(_spread(task.direction().to(mesh.device_type)))
        if owner == here:
            own[owner] = whole
        del whole
    for owner, task in owners:
        if owner == here:
            own[owner] = task.compute(own[owner]).to(task.dtype).contiguous()
    for owner, task in owners:
        parameter = _spread(task.parameter)
        if owner in own:
            whole = own.pop(owner)
        else:
            whole = torch.empty(parameter.shape, dtype=task.dtype, device=mesh.device_type)
        _broadcast(whole, mesh, owner, here)
        part = torch.empty_like(parameter, dtype=task.dtype)
        for offsets, sizes in boxes(parameter):
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            local_part(part).copy_(whole[box])
        del whole
        task.update(part)


def _spread(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "every parameter of a run is on a mesh, of one rank at least"
    return tensor


def _gather(tensor: DTensor) -> Tensor:
    """All of ``tensor``, on each rank of its mesh."""
    placements = list(tensor.placements)
    for dim in range(tensor.device_mesh.ndim):
        # One after the other: asked for all at once, PyTorch does the same and warns that it does.
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _broadcast(whole: Tensor, mesh: DeviceMesh, owner: Sequence[int], here: Sequence[int]) -> None:
    """Give ``whole`` of the rank at ``owner`` to all of ``mesh``: along its last dimension, then along the one before,
    from every rank that has it by then."""
    for dim in reversed(range(mesh.ndim)):
        if here[:dim] == owner[:dim]:
            group = mesh.get_group(dim)
            dist.broadcast(whole, src=dist.get_global_rank(group, owner[dim]), group=group)
