"""Tensor parallelism: each module's role as one of torch's parallel styles, sequence parallel between blocks.

Between blocks a rank holds some of the tokens of every row, in a block some heads and hidden features. Which module
has which role stands with its family, in ``models/``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from torchtitan.distributed.topology import KEYS, Degrees
from torchtitan.errors import ConfigError, divisors
from torchtitan.loss import Loss
from torchtitan.models.spec import Divisible, Role

TOKENS, HEADS, FEATURES = Shard(1), 2, Shard(-1)


class _GatherTokens(ParallelStyle):
    """The module's first input is gathered along the sequence, once for all that read it inside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (TOKENS,), run_check=False)
            return x.redistribute(placements=(Replicate(),)), *others

        module.register_forward_pre_hook(gather)
        return module


_STYLES: Mapping[Role, Callable[[], ParallelStyle]] = {
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
    "norm": SequenceParallel,
    "head_norm": lambda: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    "gather": _GatherTokens,
    "column": ColwiseParallel,
    "row": lambda: RowwiseParallel(output_layouts=TOKENS),
    # The loss takes the logits as they are, spread over the vocabulary.
    "head": lambda: ColwiseParallel(input_layouts=TOKENS, output_layouts=FEATURES, use_local_output=False),
}


def apply_tensor_parallel(
    model: nn.Module,
    roles: Mapping[str, Role],
    tied: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    spread_logits: bool,
) -> None:
    """Spread the parameters of ``model`` (or of a part of one) over ``mesh`` in place, as their modules' roles say.

    The logits come out as a DTensor whose vocabulary is spread, or whole on every rank where ``spread_logits`` is
    false. LookupError if a module with parameters has no role.
    """
    plan = {name: _style(role, spread_logits) for name, role in roles_of(model, roles)}
    parallelize_module(model, mesh, plan)
    # parallelize_module has made two parameters of one.
    for second, first in tied.items():
        owner, _, name = second.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(first))


def _style(role: Role, spread_logits: bool) -> ParallelStyle:
    if role == "head" and not spread_logits:
        return ColwiseParallel(input_layouts=TOKENS, output_layouts=Replicate())
    return _STYLES[role]()


def roles_of(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[tuple[str, Role]]:
    """The modules of ``model`` that have something to do, each with its role: those with parameters, of which a part of
    a model may lack some, and those that gather. LookupError where a role is missing."""
    for name, module in model.named_modules():
        role = next((role for pattern, role in roles.items() if _matches(name, pattern)), None)
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if role is not None and (has_parameters or role == "gather"):
            yield name, role
        if has_parameters and role in (None, "gather"):
            raise LookupError(f"no role matches module {name!r}, which has parameters; patterns: {', '.join(roles)}")


def _matches(name: str, pattern: str) -> bool:
    """Part by part, so that a star stands for one name."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def loss_on_spread_logits(loss: Loss, mesh: DeviceMesh) -> Loss:
    """``loss`` for logits whose vocabulary is spread over ``mesh``; its value comes out on every rank of it."""

    def spread(logits: Tensor, labels: Tensor) -> Tensor:
        value = loss(logits, DTensor.from_local(labels, mesh, (Replicate(),), run_check=False))
        return value.full_tensor() if isinstance(value, DTensor) else value

    return spread


def loss_context(spread_logits: bool) -> AbstractContextManager[Any]:
    """What a loss and its backward pass run in: under it cross entropy never gathers spread logits."""
    return loss_parallel() if spread_logits else nullcontext()


def check_tensor(degrees: Degrees, divisible: Divisible, seq_len: int) -> None:
    """ConfigError if the degree of tensor parallelism does not divide what it spreads."""
    degree, key = degrees.tensor, KEYS["tensor"]
    counts = {"query heads": divisible.heads, "key-value heads": divisible.kv_heads, "ffn features": divisible.hidden}
    for what, count in counts.items():
        if count % degree:
            raise ConfigError(
                key, f"{degree} does not divide the model's {count} {what}; try {divisors(*counts.values())}"
            )
    if seq_len % (degree * degrees.context):
        parts = f"{degree} ranks" if degrees.context == 1 else f"{degrees.context} context × {degree} tensor ranks"
        near = seq_len // (degree * degrees.context) * degree * degrees.context or degree * degrees.context
        raise ConfigError(
            "training.seq_len", f"{seq_len} tokens cannot be split evenly over {parts}; try {near}, or another degree"
        )
