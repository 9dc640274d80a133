"""What a model family tells the rest of the house, as data keyed by module and parameter names.

No family stands here, and nothing about how a model is spread over devices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan.models.init import Rule
from torchtitan.models.twin import Twin
from torchtitan.registry import Registry


@dataclass(frozen=True)
class Layout:
    """The module names of a decoder in the order the data passes them: stem, each child of ``blocks``, head.

    Any of them may be missing in a part of a model, which then passes on its first input in its place. ``mask`` makes
    of the positions what ``attention``, named as it is within a block, takes beside queries, keys and values.
    """

    stem: tuple[str, ...]
    blocks: str
    head: tuple[str, ...]
    mask: str = "mask"
    attention: str = "attention.inner_attention"

    def check(self, model: nn.Module) -> None:
        """LookupError if ``model`` lacks a module that this names."""
        names = {name for name, _ in model.named_modules()}
        named = {"stem": self.stem, "blocks": [self.blocks], "head": self.head, "mask": [self.mask]}
        for what, modules in named.items():
            for module in modules:
                if module not in names:
                    raise LookupError(f"layout.{what} names {module!r}, and the model has no such module")
        for block, _ in model.get_submodule(self.blocks).named_children():
            if f"{self.blocks}.{block}.{self.attention}" not in names:
                raise LookupError(f"layout.attention names {self.attention!r}, and block {block!r} has no such module")


Role = Literal["embedding", "norm", "head_norm", "gather", "column", "row", "head"]
"""What a module does to activations ``[batch, seq, features]`` whose features, or between blocks whose tokens, are
spread: "embedding" looks tokens up, rows of its table apart; "norm" works on each token by itself, "head_norm" on each
head of ``[batch, seq, heads, head_dim]``; "gather" needs all tokens of a sequence; "column" holds some of the outputs
of a linear map and "row" some of its inputs; "head" is a column whose outputs are the logits."""


def roles_of(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[tuple[str, Role]]:
    """The modules of ``model`` that have something to do, each with its role: those with parameters, of which a part of
    a model may lack some, and those that gather. LookupError where a role is missing."""
    for name, module in model.named_modules():
        role = role_of(name, roles)
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if role is not None and (has_parameters or role == "gather"):
            yield name, role
        if has_parameters and role in (None, "gather"):
            raise LookupError(f"no role matches module {name!r}, which has parameters; patterns: {', '.join(roles)}")


def role_of(name: str, roles: Mapping[str, Role]) -> Role | None:
    """The role of the module called ``name``, if it has one."""
    return next((role for pattern, role in roles.items() if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    """Part by part, so that a star stands for one name."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


class _Unfilled(TorchFunctionMode):
    """Modules draw no weights of their own, as theirs are drawn by name later: on the meta device that would give
    nothing, and take seconds, for torch imports its compiler to do so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DRAWS or (getattr(func, "__module__", None) == nn.init.__name__ and func.__name__.endswith("_")):
            return args[0] if args else given["tensor"]
        return func(*args, **given)


_DRAWS = {
    getattr(Tensor, f"{name}_")
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
}


@dataclass(frozen=True)
class Divisible:
    """What a degree must divide where it spreads features: query heads, key-value heads, the feed-forward width."""

    heads: int
    kv_heads: int
    hidden: int


@dataclass(frozen=True)
class Tokenwise:
    """Floating-point operations to train on one token, forward and backward (PaLM, appendix B).

    ``weights`` are those of the matrix products with parameters, ``attention`` those of scores and values when
    every query meets every key; a causal kernel needs half of the latter.
    """

    weights: float
    attention: float

    @property
    def full(self) -> float:
        return self.weights + self.attention

    @property
    def causal(self) -> float:
        return self.weights + self.attention / 2


@dataclass(frozen=True)
class ModelSpec:
    """One family: how to build it and the tables that others apply to it.

    ``cls(args)`` is an ordinary module with ``forward(tokens, positions) -> logits``, both inputs ``[batch, seq]``,
    the output ``[batch, seq, vocab]``. ``args_cls`` is a frozen dataclass with at least ``vocab_size``.
    ``init`` gives a rule for every parameter name pattern, the first match counting; ``roles`` a role for the pattern
    of every module that has parameters.
    """

    cls: Callable[[Any], nn.Module]
    args_cls: type
    flavors: dict[str, Any]
    layout: Layout
    init: Callable[[Any], Mapping[str, Rule]]
    flops: Callable[[Any, int], Tokenwise]
    roles: Mapping[str, Role]
    divisible: Callable[[Any], Divisible]
    tied: Callable[[Any], Mapping[str, str]] = field(default=lambda args: {})
    """Second name → first name of a parameter that stands in the model under two names."""
    max_seq_len: Callable[[Any], int | None] = field(default=lambda args: None)
    """The longest sequence in tokens that the model has positions for, ``args.max_seq_len``; None: there is none."""
    huggingface: Twin | None = None
    """The same family as the Hugging Face library has it, if it does."""

    def add_flavor(self, name: str, args: Any) -> None:
        """Offer ``args`` as a flavor of the family, from outside its file; ValueError if it cannot be one."""
        if name in self.flavors:
            raise ValueError(f"flavor {name!r} is taken")
        if not isinstance(args, self.args_cls):
            raise ValueError(f"flavor {name!r} must be {self.args_cls.__name__}, not {type(args).__name__}")
        self.flavors[name] = args

    def build_meta(self, args: Any) -> nn.Module:
        """The model with shapes and no memory, ties in place."""
        with torch.device("meta"), _Unfilled():
            return self.cls(args)

    def count_parameters(self, args: Any) -> int:
        """Number of parameters, a tied one counted once."""
        return sum(p.numel() for p in self.build_meta(args).parameters())


MODELS: Registry[ModelSpec] = Registry("model", home="torchtitan.models")
