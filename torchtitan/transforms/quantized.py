"""What converters of linear maps share: which maps of a model they take, what they say of it, and how torchao is found.

What becomes of a map is in the file of each: ``float8.py``, ``mx.py``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from torchtitan.config.options import nearest
from torchtitan.errors import ConfigError, one_line
from torchtitan.log import logger, no_warnings

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of converters
    from torch import nn

Filters = list[Annotated[str, Field(min_length=1)]]


class Quantized:
    """A converter of the linear maps that no part of a name in ``filters`` is in, of sizes that divide.

    ``name`` is the converter's, ``kind`` that of its numbers; both sizes of a map must be multiples of ``multiple``, of
    a tensor rank's part those of ``part_multiple_of``, and so must tokens be that are computed at once, of
    ``tokens_multiple_of``.
    """

    name: str
    multiple: int
    part_multiple_of: int
    tokens_multiple_of: int

    def __init__(self, kind: str, filters: Sequence[str], *, needed: bool = True) -> None:
        """Unless ``needed``, filters may name nothing."""
        self._kind, self._filters, self._needed = kind, filters, needed

    def __call__(self, model: nn.Module) -> None:
        """Convert the chosen maps of ``model``, which may be a part of one."""
        raise NotImplementedError

    def takes(self, module: nn.Module) -> bool:
        """Whether ``module`` is a map that has been converted."""
        raise NotImplementedError

    def gains(self, name: str, module: nn.Linear) -> bool:
        """Whether the map is large enough."""
        return True

    def check(self, model: nn.Module) -> None:
        """ConfigError, of the whole model, for a filter that names nothing, or where nothing is left."""
        maps = dict(_linear_maps(model))
        key = f"{self.name}.filter_fqns"
        for part in self._filters if self._needed else ():
            if not any(part in name for name in maps):
                raise ConfigError(key, f"no linear map has {part!r} in its name{_hint(part, maps)}")
        left_out = Counter(reason for name, module in maps.items() if (reason := self._left_out(name, module)))
        told = "; left out: " + ", ".join(f"{n} {reason}" for reason, n in left_out.items()) if left_out else ""
        if left_out.total() == len(maps):
            raise ConfigError(
                key if self._filters else "model.converters",
                f"{self._kind} would change none of {len(maps)} linear maps{told}; leave it out",
            )
        logger.info(f"{self._kind}: {len(maps) - left_out.total()} of {len(maps)} linear maps{told}")

    def check_parts(self, modules: Iterable[tuple[str, str, Any]], *, tensor: int, tokens: int) -> None:
        """ConfigError if converted maps among ``modules``, each with its name and its role before it, cannot be shared
        by as many ``tensor`` ranks, or cannot take as many ``tokens`` at once."""
        if tokens % self.tokens_multiple_of:
            raise ConfigError(
                "training.local_batch_size",
                f"a rank computes {tokens} tokens at once, and {self.name} takes multiples of "
                f"{self.tokens_multiple_of}; change it or training.seq_len",
            )
        for name, role, module in modules:
            if not self.takes(module):
                continue
            side, features = ("inputs", module.in_features) if role == "row" else ("outputs", module.out_features)
            if features % (self.part_multiple_of * tensor):
                raise ConfigError(
                    "parallelism.tensor_parallel_degree",
                    f"a rank's part of the {features} {side} of {name} would be no multiple of "
                    f"{self.part_multiple_of}, which {self.name} takes; lower it, or name {name} in "
                    f"{self.name}.filter_fqns",
                )

    def chosen(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The maps of ``model``, which may be a part of one, that are converted."""
        return {name: module for name, module in _linear_maps(model) if self._left_out(name, module) is None}

    def _left_out(self, name: str, module: nn.Linear) -> str | None:
        """Why this map stays as it is, if it does."""
        from torch import nn

        if type(module) is not nn.Linear or "forward" in vars(module):
            return "of a class of its own"
        if any(part in name for part in self._filters):
            return "by name"
        if module.in_features % self.multiple or module.out_features % self.multiple:
            return f"whose sizes are no multiples of {self.multiple}"
        return None if self.gains(name, module) else "too small to gain"


@contextlib.contextmanager
def torchao() -> Iterator[None]:
    """To import parts of torchao in, which costs seconds: ConfigError where it is not there or does not fit. What it
    says of kernels that it cannot load here concerns none of these."""
    try:
        with no_warnings("torchao", "torch.utils._pytree"):
            yield
    except ImportError as error:
        raise ConfigError(
            "model.converters", f"torchao cannot be used ({one_line(error)}); pip install 'torchao>=0.18,<0.19'"
        ) from error


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def check_device(converter: str, emulate: bool, what: str) -> None:
    """ConfigError where products of ``what`` must be emulated, for there is no GPU at all."""
    if not emulate and not has_gpu():
        raise ConfigError(
            f"{converter}.emulate", f"there is no GPU here to multiply in {what}; true rounds alike, slowly"
        )


def check_capability(converter: str, emulate: bool, what: str, least: tuple[int, int]) -> None:
    """The same for a GPU below ``least``. Looked at on the device of a run alone: whoever only checks a configuration
    must not take memory there."""
    import torch

    if emulate or not torch.cuda.is_initialized():
        return
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < least:
        raise ConfigError(
            f"{converter}.emulate",
            f"this GPU (SM{major}{minor}) cannot multiply in {what}, which takes SM{least[0]}{least[1]}; true rounds "
            "alike, slowly",
        )


def _linear_maps(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from torch import nn

    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _hint(part: str, names: Collection[str]) -> str:
    ends = {".".join(words[first:]) for name in names for words in [name.split(".")] for first in range(len(words))}
    near = nearest(part, ends)
    return f"; did you mean {near}?" if near else f"; names look like {next(iter(names), 'layers.0.attention.wq')}"
