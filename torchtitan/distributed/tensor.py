"""Tensor parallelism: what each module's role makes of its parameters and of what goes through it.

Parameters are DTensors, so that whoever shards, saves or counts them sees them whole; a module computes on its own
rank's part of them as if that were all. Between blocks a rank holds some of the tokens of every row (sequence parallel,
Korthikanti et al. 2022), in a block some heads and hidden features. Which module has which role stands with its
family, in ``models/``.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchtitan.distributed.collectives import gather_dim, max_alike, scatter_dim, sum_alike
from torchtitan.distributed.gradients import local_part, sum_gradients
from torchtitan.errors import ConfigError
from torchtitan.loss.losses import Loss, VocabularyPart
from torchtitan.models.spec import Role, roles_of
from torchtitan.transforms.float8 import is_float8

TOKENS = 1
"""The dimension of ``[batch, seq, features]`` that is spread between blocks."""


def apply_tensor_parallel(
    model: nn.Module,
    roles: Mapping[str, Role],
    tied: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    spread_logits: bool,
) -> None:
    """Spread the parameters of ``model`` (or of a part of one) over ``mesh`` in place, as their modules' roles say.

    The logits that come out are those of this rank's part of the vocabulary, or where ``spread_logits`` is false, whole
    on every rank. LookupError if a module with parameters has no role.
    """
    spread_roles = dict(roles_of(model, roles))
    for name, role in spread_roles.items():
        module = model.get_submodule(name)
        if "forward" in vars(module) and role != "gather":
            raise ConfigError(
                "model.converters",
                f"gave module {name} another forward, which tensor parallelism would not see; put a module of another "
                "class in its place",
            )
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter, mesh, (_placement(role, parameter_name),))
            module.register_parameter(parameter_name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        if is_float8(module):
            from torchtitan.distributed.float8 import spread_float8  # imports torchao, which takes seconds

            spread_float8(module, role, mesh.get_group())
        if role != "gather":
            _FORWARD[role](module, mesh, spread_logits)
    for name, role in spread_roles.items():
        if role == "gather":
            inside = [
                model.get_submodule(n) for n, r in spread_roles.items() if r == "column" and n.startswith(f"{name}.")
            ]
            _gather(model.get_submodule(name), mesh, inside)
    # A tied parameter has been spread once for each of its names.
    for second, first in tied.items():
        owner, _, name = second.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(first))


def _placement(role: Role, parameter: str) -> Placement:
    if role in ("embedding", "column", "head"):
        return Shard(0)
    if role == "row" and parameter == "weight":
        return Shard(1)
    return Replicate()


@dataclass(frozen=True)
class _Spread:
    """What a module computes its part with: ``twin``, the forward pass that it has by its class on this rank's parts of
    its parameters, and who has the others.

    It is found on the module by functions that all modules share, so that blocks compile to one graph and not to one
    each.
    """

    twin: nn.Module
    group: ProcessGroup
    mesh: DeviceMesh
    rows: tuple[int, int] = (0, 0)
    """The first of the rows of a table that this rank holds, and the one after its last."""
    size: int = 0
    """Rows of the whole table."""
    spread_logits: bool = True


def _set_forward(
    module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, *, without: str = "", **more: Any
) -> None:
    """Compute by ``forward(module, ...)``; of its parameters the twin has none ``without`` name."""
    # It shares all with the module but its parameters: those of the module come and go with FSDP's gathering.
    twin = copy.copy(module)
    names = tuple(twin._parameters)
    twin._parameters = {}
    twin.__dict__["owner"] = module  # and not as a module in it
    cls: Any = type(module)
    twin.__class__ = _reading_parts(cls, names, without)
    module.spread = _Spread(twin, mesh.get_group(), mesh, **more)  # type: ignore[assignment]
    module.forward = MethodType(forward, module)


@functools.cache
def _reading_parts(cls: Any, names: tuple[str, ...], without: str) -> Any:
    """``cls`` whose parameters ``names`` are this rank's parts of those of the ``owner`` of an instance; nothing is set
    for that, which in a checkpointed and compiled block nothing may be."""

    def part(name: str) -> property:
        def read(twin: Any) -> Tensor | None:
            parameter = twin.owner._parameters[name]
            return None if parameter is None or name == without else local_part(parameter)

        return property(read)

    return type(cls.__name__, (cls,), {"training": property(_training)} | {name: part(name) for name in names})


def _training(twin: Any) -> bool:
    return bool(twin.owner.training)


def _compute(module: Any, *inputs: Any) -> Any:
    """The forward pass that ``module`` has by its class, on this rank's parts of its parameters."""
    twin = module.spread.twin
    return type(twin).forward(twin, *inputs)


def _gather(module: nn.Module, mesh: DeviceMesh, readers: Sequence[nn.Module]) -> None:
    """The first input is gathered along the tokens, once for all ``readers`` inside."""
    gathered = functools.partial(gather_dim, dim=TOKENS, group=mesh.get_group())
    if any(map(is_float8, readers)):
        from torchtitan.distributed.float8 import gather_float8, gathers_float8

        if gathers_float8(readers):
            gathered = functools.partial(gather_float8, dim=TOKENS, reader=readers[0])
    module.register_forward_pre_hook(lambda module, inputs: (gathered(inputs[0]), *inputs[1:]))


def _on_its_own(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """A column, or a norm on some tokens or some heads, needs nothing of other ranks."""
    _set_forward(module, _compute, mesh)


def _row(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """Each rank has a part of every output's sum; what is added to the sum is added once."""
    _set_forward(module, _row_forward, mesh, without="bias")


def _row_forward(module: Any, x: Tensor) -> Tensor:
    out = scatter_dim(_compute(module, x), TOKENS, module.spread.group)
    bias = module._parameters.get("bias")
    return out if bias is None else out + local_part(bias)


def _embedding(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """A rank looks up the tokens of its part of the vocabulary; all others are zeros there."""
    vocabulary, _ = module.get_parameter("weight").shape
    _set_forward(module, _embedding_forward, mesh, rows=_own_rows(vocabulary, mesh))


def _embedding_forward(module: Any, tokens: Tensor) -> Tensor:
    first, last = module.spread.rows
    elsewhere = (tokens < first) | (tokens >= last)
    out = _compute(module, (tokens - first).masked_fill(elsewhere, 0))
    return scatter_dim(out.masked_fill(elsewhere.unsqueeze(-1), 0.0), TOKENS, module.spread.group)


def _own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """The first of the ``rows`` of a table that this rank holds, and the one after its last; as Shard cuts."""
    each = -(-rows // mesh.size())
    first = mesh.get_local_rank() * each
    return first, min(first + each, rows)


def _head(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    vocabulary, _ = module.get_parameter("weight").shape
    _set_forward(module, _head_forward, mesh, size=vocabulary, spread_logits=spread_logits)


def _head_forward(module: Any, x: Tensor) -> Tensor:
    spread: _Spread = module.spread
    local: Tensor = _compute(module, gather_dim(x, TOKENS, spread.group))
    if spread.spread_logits:
        return local
    return _whole_logits(local, spread.size, spread.mesh)


def _whole_logits(local: Tensor, vocabulary: int, mesh: DeviceMesh) -> Tensor:
    """All logits, ``[batch, seq, vocabulary]``, on every rank, of which each has computed its part."""
    shape = torch.Size((*local.shape[:-1], vocabulary))
    stride = (shape[1] * vocabulary, vocabulary, 1)
    logits = DTensor.from_local(local, mesh, (Shard(2),), run_check=False, shape=shape, stride=stride)
    # Of parts that are not equally large torch 2.11 makes a view into padding, which a pipeline does not expect.
    return logits.full_tensor(grad_placements=(Replicate(),)).contiguous()


_FORWARD: Mapping[Role, Callable[[nn.Module, DeviceMesh, bool], None]] = {
    "embedding": _embedding,
    "norm": _on_its_own,
    "head_norm": _on_its_own,
    "column": _on_its_own,
    "row": _row,
    "head": _head,
}


def spread_loss(loss: Loss, mesh: DeviceMesh, vocab_size: int, *, spread_logits: bool) -> Loss:
    """``loss`` of the logits of this rank's part of the vocabulary: by what a loss is told of such a part, or where
    ``spread_logits`` is false, of the logits put together."""
    if not spread_logits:
        return lambda local, labels: loss(_whole_logits(local, vocab_size, mesh), labels)
    group = mesh.get_group()
    first, _ = _own_rows(vocab_size, mesh)
    part = VocabularyPart(
        first, vocab_size, sum=functools.partial(sum_alike, group=group), max=functools.partial(max_alike, group=group)
    )
    return functools.partial(loss, part=part)


def tensor_seams(loss: Loss, mesh: DeviceMesh, vocab_size: int, *, spread_logits: bool) -> dict[str, Any]:
    """What ``mesh`` asks of a run of the model, as fields of ``Seams``: ``loss`` of logits of a part of the vocabulary,
    and the gradients of parameters that are whole on every rank."""
    group = mesh.get_group()

    def complete_gradients(parameters: Sequence[Tensor]) -> None:
        # Each rank saw some of the tokens that went through them, or some of the heads.
        whole = [p for p in parameters if isinstance(p, DTensor) and p.placements[-1].is_replicate()]
        sum_gradients(whole, group)

    seams: dict[str, Any] = {"complete_gradients": complete_gradients}
    return seams | ({"loss": spread_loss(loss, mesh, vocab_size, spread_logits=True)} if spread_logits else {})
