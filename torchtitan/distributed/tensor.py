"""Tensor parallelism: what each module's role makes of its parameters and of what goes through it.

Parameters are DTensors, so that whoever shards, saves or counts them sees them whole; a module computes on its own
rank's part of them as if that were all. Between blocks a rank holds some of the tokens of every row (sequence parallel,
Korthikanti et al. 2022), in a block some heads and hidden features. Which module has which role stands with its
family, in ``models/``.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchtitan.distributed.collectives import gather_dim, max_alike, scatter_dim, sum_alike
from torchtitan.distributed.gradients import local_part, sum_gradients
from torchtitan.errors import ConfigError
from torchtitan.loss.losses import Loss, VocabularyPart
from torchtitan.models.spec import Role, roles_of

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
    for name, role in list(roles_of(model, roles)):
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
        _FORWARD[role](module, mesh, spread_logits)
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


class _OnLocalParts:
    """The forward pass that a module has by its class, on this rank's parts of its parameters."""

    def __init__(self, module: nn.Module, *, without: str = "") -> None:
        self._module, self._without = module, without
        # It shares all with the module but its parameters: those of the module come and go with FSDP's gathering.
        self._twin = copy.copy(module)
        self._twin._parameters = {}

    def __call__(self, *inputs: Any) -> Any:
        twin = self._twin
        twin.training = self._module.training
        for name, parameter in self._module._parameters.items():
            held = parameter is not None and name != self._without
            twin._parameters[name] = local_part(parameter) if held else None  # type: ignore[arg-type, assignment]
        try:
            return type(twin).forward(twin, *inputs)
        finally:
            twin._parameters.clear()


def _gather(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """The first input is gathered along the tokens, once for all that read it inside."""
    group = mesh.get_group()
    module.register_forward_pre_hook(lambda module, inputs: (gather_dim(inputs[0], TOKENS, group), *inputs[1:]))


def _on_its_own(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """A column, or a norm on some tokens or some heads, needs nothing of other ranks."""
    module.forward = _OnLocalParts(module)


def _row(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """Each rank has a part of every output's sum; what is added to the sum is added once."""
    group, compute = mesh.get_group(), _OnLocalParts(module, without="bias")

    def forward(x: Tensor) -> Tensor:
        out = scatter_dim(compute(x), TOKENS, group)
        bias = module._parameters.get("bias")
        return out if bias is None else out + local_part(bias)

    module.forward = forward


def _embedding(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    """A rank looks up the tokens of its part of the vocabulary; all others are zeros there."""
    group, compute = mesh.get_group(), _OnLocalParts(module)
    vocabulary, _ = module.get_parameter("weight").shape
    first, last = _own_rows(vocabulary, mesh)

    def forward(tokens: Tensor) -> Tensor:
        elsewhere = (tokens < first) | (tokens >= last)
        out = compute((tokens - first).masked_fill(elsewhere, 0))
        return scatter_dim(out.masked_fill(elsewhere.unsqueeze(-1), 0.0), TOKENS, group)

    module.forward = forward


def _own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """The first of the ``rows`` of a table that this rank holds, and the one after its last; as Shard cuts."""
    each = -(-rows // mesh.size())
    first = mesh.get_local_rank() * each
    return first, min(first + each, rows)


def _head(module: nn.Module, mesh: DeviceMesh, spread_logits: bool) -> None:
    group, compute = mesh.get_group(), _OnLocalParts(module)
    vocabulary, _ = module.get_parameter("weight").shape

    def forward(x: Tensor) -> Tensor:
        local = compute(gather_dim(x, TOKENS, group))
        return local if spread_logits else _whole_logits(local, vocabulary, mesh)

    module.forward = forward


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
    "gather": _gather,
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
    part = VocabularyPart(first, vocab_size, sum=partial(sum_alike, group=group), max=partial(max_alike, group=group))
    return partial(loss, part=part)


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
