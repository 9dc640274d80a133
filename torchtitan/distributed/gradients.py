"""Norm of all gradients over every rank, and clipping by it.

Optimizers are in ``optim/``; what a non-finite norm means for the run is the trainer's to say.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def global_norm(
    parameters: Sequence[Tensor], *, duplicates: Sequence[Tensor] = (), pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """The 2-norm over the gradients of ``parameters`` on all ranks, float32, the same on each of them.

    Elements held by several ranks of a parameter's mesh count once. ``pipeline`` are the ranks that hold the other
    stages of the model, and ``duplicates`` those of ``parameters`` that another stage counts.
    """
    counted_elsewhere = {id(parameter) for parameter in duplicates}
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or id(parameter) in counted_elsewhere:
            continue
        if isinstance(grad, DTensor):
            if any(p.is_partial() for p in grad.placements):
                raise RuntimeError(f"a gradient is still partial over ranks: {grad.placements}")
            # Not is_shard(): of a weight spread over two dimensions, the strided one says no.
            dims = tuple(d for d, p in enumerate(grad.placements) if not p.is_replicate())
            groups.setdefault((grad.device_mesh, dims), []).append(grad.to_local())
        else:
            groups.setdefault((None, ()), []).append(grad)
    squares = []
    for (mesh, dims), grads in groups.items():
        square = torch.stack([_square_norm(grad) for grad in grads]).sum()
        for dim in dims:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=parameters[0].device)
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def _square_norm(grad: Tensor) -> Tensor:
    # Row by row: over millions of elements at once, a CPU's norm is off by 1e-4, and by how much depends on the shard.
    return torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32).square().sum()


def sum_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give each of ``parameters``, which all ranks of ``group`` hold alike, the sum of its gradients there; in one
    reduction."""
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_by_norm(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their ``norm`` is at most ``max_norm``; 0 leaves them as they are."""
    if max_norm == 0:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_([local_part(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
