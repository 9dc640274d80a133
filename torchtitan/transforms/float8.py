"""Float8 linear maps of torchao: which maps of a model become such, by which recipe, and what is refused.

How the scales of a map whose parts lie on several ranks become those of the whole is in ``distributed/float8.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from torchtitan.errors import ConfigError
from torchtitan.log import no_warnings
from torchtitan.transforms import CONVERTERS, Converter
from torchtitan.transforms.quantized import (
    Filters,
    Quantized,
    check_capability,
    check_device,
    has_gpu,
    torchao,
)

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch import nn

NAME = "quantize.linear.float8"
SMALL = "auto_filter_small_kn"
"""The word among the filters that asks for torchao's own choice of maps that are too small to gain."""

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@CONVERTERS.register(NAME)
def float8(
    *,
    recipe_name: Annotated[
        Recipe | None,
        Field(
            description="tensorwise, which none is too: a scale a tensor; rowwise: a scale a row, a power of two; "
            "rowwise_with_gw_hp: the same, with gradients of weights in the precision of the run"
        ),
    ] = "tensorwise",
    filter_fqns: Annotated[
        Filters,
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
    check_device(NAME, emulate, "float8")
    if enable_fsdp_float8_all_gather and not has_gpu():
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


class Float8(Quantized):
    """Puts torchao's maps in the place of those linear maps of a model that ``filters`` and their sizes leave."""

    name = NAME
    multiple = 16
    """What products of the hardware take; so of tokens, where gradients of weights are in float8."""

    def __init__(
        self, recipe: Recipe, filters: Sequence[str], *, emulate: bool, gather: bool = False, precompute: bool = False
    ) -> None:
        super().__init__(f"float8 ({recipe})", [part for part in filters if part != SMALL])
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
        self._scales_by_shards = gather and not precompute
        self.part_multiple_of = 1 if emulate else self.multiple
        self.tokens_multiple_of = 1 if emulate or recipe == "rowwise_with_gw_hp" else self.multiple

    def takes(self, module: nn.Module) -> bool:
        return is_float8(module)

    def gains(self, name: str, module: nn.Linear) -> bool:
        return self._pays(module, name)

    def check_parts(self, modules: Iterable[tuple[str, str, Any]], *, tensor: int, tokens: int) -> None:
        super().check_parts(modules, tensor=tensor, tokens=tokens)
        if tensor > 1 and self._scales_by_shards:
            raise ConfigError(
                f"{NAME}.enable_fsdp_float8_all_gather",
                "weights would have a scale for each tensor rank; set "
                f"{NAME}.precompute_float8_dynamic_scale_for_fsdp = true, which finds one for all of them, or leave it "
                "at false",
            )

    def __call__(self, model: nn.Module) -> None:
        check_capability(NAME, self._config.emulate, "float8", (8, 9))
        with torchao():
            from torchao.float8 import convert_to_float8_training
        chosen = self.chosen(model)
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=self._config)


def is_float8(module: nn.Module) -> bool:
    """Whether ``module`` is a linear map of torchao, which is not imported to tell."""
    return hasattr(module, "linear_mm_config")


def _find_scales(model: nn.Module) -> None:
    """Of all weights of ``model`` that are gathered as float8, over all ranks that share them."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with no_warnings("torch.distributed.tensor._redistribute"):  # that two mesh dimensions take two reductions
        precompute_float8_dynamic_scale_for_fsdp(model)


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
