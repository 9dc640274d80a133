"""Float8 linear maps of torchao: which maps of a model become such, by which recipe, and what is refused.

How the scales of a map whose parts lie on several ranks become those of the whole is in ``distributed/float8.py``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from torchtitan.config.options import nearest
from torchtitan.errors import ConfigError, one_line
from torchtitan.log import logger
from torchtitan.transforms import CONVERTERS, Converter

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch import nn

NAME = "quantize.linear.float8"
SMALL = "auto_filter_small_kn"
"""The word among the filters that asks for torchao's own choice of maps that are too small to gain."""
MULTIPLE = 16
"""What products of the hardware take: both sizes of a weight, and tokens where gradients of weights are in float8."""

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@CONVERTERS.register(NAME)
def float8(
    *,
    recipe_name: Annotated[
        Recipe | None,
        Field(
            description="tensorwise, the default: a scale a tensor; rowwise: a scale a row, a power of two; "
            "rowwise_with_gw_hp: the same, with gradients of weights in the precision of the run"
        ),
    ] = None,
    filter_fqns: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(
            description=f"parts of names of linear maps that stay as they are, such as output; {SMALL}: and those that "
            "torchao finds too small to gain"
        ),
    ] = [],  # noqa: B006
    emulate: Annotated[
        bool, Field(description="round to float8, but multiply in float32: the same numbers on any device, slowly")
    ] = False,
    enable_fsdp_float8_all_gather: Annotated[
        bool, Field(description="tensorwise: gather sharded weights as float8")
    ] = False,
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, Field(description="with that, find the scales of all weights at once after each step")
    ] = False,
) -> Converter:
    """Linear maps that multiply in float8 (Micikevicius et al. 2022), by torchao."""
    recipe: Recipe = recipe_name or "tensorwise"
    _check_gather(recipe, enable_fsdp_float8_all_gather, precompute_float8_dynamic_scale_for_fsdp)
    _check_device(emulate)
    if enable_fsdp_float8_all_gather and not _has_gpu():
        raise ConfigError(
            f"{NAME}.enable_fsdp_float8_all_gather", "weights are gathered as float8 on GPUs only; leave it at false"
        )
    return Float8(
        recipe,
        filter_fqns,
        emulate=emulate,
        gather=enable_fsdp_float8_all_gather,
        precompute=precompute_float8_dynamic_scale_for_fsdp,
    )


class Float8:
    """Puts torchao's maps in the place of those linear maps of a model that ``filters`` and their sizes leave."""

    def __init__(
        self, recipe: Recipe, filters: Sequence[str], *, emulate: bool, gather: bool = False, precompute: bool = False
    ) -> None:
        self._recipe = recipe
        self._parts = [part for part in filters if part != SMALL]
        with torchao():
            from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe
        self._pays: Callable[[nn.Module, str], bool] = lambda module, name: True
        if SMALL in filters:
            if recipe == "rowwise_with_gw_hp":
                raise ConfigError(
                    f"{NAME}.filter_fqns", f"torchao has no rule for {SMALL} with {recipe}; name the maps to leave out"
                )
            self._pays = _auto_filter_for_recipe(recipe, [])
        self._config = replace(
            Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, enable_fsdp_float8_all_gather=gather
        )
        self.after_step: Callable[[nn.Module], None] | None = _find_scales if precompute else None
        self.scales_by_shards = gather and not precompute
        self.tokens_multiple_of = 1 if emulate or recipe == "rowwise_with_gw_hp" else MULTIPLE

    def check(self, model: nn.Module) -> None:
        """ConfigError, of the whole model, for a filter that names nothing, or where nothing is left."""
        maps = dict(_linear_maps(model))
        for part in self._parts:
            if not any(part in name for name in maps):
                raise ConfigError(f"{NAME}.filter_fqns", f"no linear map has {part!r} in its name{_hint(part, maps)}")
        left_out = Counter(reason for name, module in maps.items() if (reason := self._left_out(name, module)))
        told = "; left out: " + ", ".join(f"{n} {reason}" for reason, n in left_out.items()) if left_out else ""
        if left_out.total() == len(maps):
            key = f"{NAME}.filter_fqns" if self._parts else "model.converters"
            raise ConfigError(key, f"float8 would change none of {len(maps)} linear maps{told}; leave it out")
        logger.info(f"float8 ({self._recipe}): {len(maps) - left_out.total()} of {len(maps)} linear maps{told}")

    def __call__(self, model: nn.Module) -> None:
        _check_capability(self._config.emulate)
        with torchao():
            from torchao.float8 import convert_to_float8_training
        chosen = {name for name, module in _linear_maps(model) if self._left_out(name, module) is None}
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=self._config)

    def _left_out(self, name: str, module: nn.Linear) -> str | None:
        """Why this map stays as it is, if it does."""
        from torch import nn

        if type(module) is not nn.Linear or "forward" in vars(module):
            return "of a class of its own"
        if any(part in name for part in self._parts):
            return "by name"
        if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            return f"whose sizes are no multiples of {MULTIPLE}"
        return None if self._pays(module, name) else "too small to gain"


def is_float8(module: nn.Module) -> bool:
    """Whether ``module`` is a linear map of torchao, which is not imported to tell."""
    return hasattr(module, "linear_mm_config")


def _hint(part: str, names: Collection[str]) -> str:
    ends = {".".join(words[first:]) for name in names for words in [name.split(".")] for first in range(len(words))}
    near = nearest(part, ends)
    return f"; did you mean {near}?" if near else f"; names look like {next(iter(names), 'layers.0.attention.wq')}"


@contextlib.contextmanager
def torchao() -> Iterator[None]:
    """To import parts of torchao in, which costs seconds: ConfigError where it is not there or does not fit. What it
    says of kernels that it cannot load here concerns none of these."""
    try:
        with _no_warnings("torchao", "torch.utils._pytree"):
            yield
    except ImportError as error:
        raise ConfigError(
            "model.converters", f"torchao cannot be used ({one_line(error)}); pip install 'torchao>=0.18,<0.19'"
        ) from error


def _find_scales(model: nn.Module) -> None:
    """Of all weights of ``model`` that are gathered as float8, over all ranks that share them."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with _no_warnings("torch.distributed.tensor._redistribute"):  # that two mesh dimensions take two reductions
        precompute_float8_dynamic_scale_for_fsdp(model)


@contextlib.contextmanager
def _no_warnings(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _linear_maps(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from torch import nn

    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _check_gather(recipe: Recipe, gather: bool, precompute: bool) -> None:
    if precompute and not gather:
        raise ConfigError(
            f"{NAME}.precompute_float8_dynamic_scale_for_fsdp",
            "there are no gathered float8 weights whose scales it would find; set "
            f"{NAME}.enable_fsdp_float8_all_gather = true as well, or leave it at false",
        )
    if gather and recipe != "tensorwise":
        raise ConfigError(
            f"{NAME}.enable_fsdp_float8_all_gather",
            f"a shard has no whole rows and columns to scale by {recipe}; leave it at false, or take "
            f'{NAME}.recipe_name = "tensorwise"',
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_device(emulate: bool) -> None:
    if not emulate and not _has_gpu():
        raise ConfigError(
            f"{NAME}.emulate", "there is no GPU here to multiply in float8; true gives the same numbers, slowly"
        )


def _check_capability(emulate: bool) -> None:
    """Asked on the device of a run alone: whoever only checks must not take memory there."""
    import torch

    if emulate or not torch.cuda.is_initialized():
        return
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"{NAME}.emulate",
            f"this GPU (SM{major}{minor}) cannot multiply in float8, which takes SM89; true gives the same numbers, "
            "slowly",
        )
