"""MXFP8 linear maps of torchao: every 32 numbers that are summed share a scale, a power of two.

Blocks lie within a rank's part in every layout, so nothing here is reduced over ranks. What it shares with float8 is in
``quantized.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from torchtitan.transforms import CONVERTERS, Converter
from torchtitan.transforms.quantized import Filters, Quantized, check_capability, check_device, torchao

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch import nn

NAME = "quantize.linear.mx"
_HEAD = ["output"]
_SCALES = {"mxfp8_cublas": "FLOOR", "mxfp8_cublas_rceil": "RCEIL"}

Recipe = Literal["mxfp8_cublas", "mxfp8_cublas_rceil"]


@CONVERTERS.register(NAME)
def mx(
    *,
    recipe_name: Annotated[
        Recipe,
        Field(
            description="mxfp8_cublas: scales rounded down, so that the largest numbers of a block may be cut; "
            "mxfp8_cublas_rceil: rounded up"
        ),
    ] = "mxfp8_cublas",
    filter_fqns: Annotated[Filters, Field(description="parts of names of linear maps that stay as they are")] = _HEAD,
    emulate: Annotated[
        bool, Field(description="round to MXFP8, but multiply in the precision of the run; on any device, slowly")
    ] = False,
) -> Converter:
    """Linear maps that multiply in MXFP8 (OCP Microscaling Formats 1.0), by torchao."""
    check_device(NAME, emulate, "MXFP8")
    return Mx(recipe_name, filter_fqns, emulate=emulate)


class Mx(Quantized):
    """Puts torchao's maps in the place of those linear maps of a model that ``filters`` and their sizes leave."""

    name = NAME
    multiple = part_multiple_of = tokens_multiple_of = 32
    """The numbers of a block, along whatever is summed."""

    def __init__(self, recipe: Recipe, filters: Sequence[str], *, emulate: bool) -> None:
        super().__init__(f"MXFP8 ({recipe})", filters, needed=list(filters) != _HEAD)
        self._scales, self._emulate = _SCALES[recipe], emulate

    def takes(self, module: nn.Module) -> bool:
        return hasattr(module, "scale_calculation_mode")

    def __call__(self, model: nn.Module) -> None:
        check_capability(NAME, self._emulate, "MXFP8", (10, 0))
        with torchao():
            from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
        preference = KernelPreference.EMULATED if self._emulate else KernelPreference.AUTO
        for name, plain in self.chosen(model).items():
            converted = MXFP8Linear(
                plain.in_features,
                plain.out_features,
                bias=False,
                device="meta",
                kernel_preference=preference,
                scale_calculation_mode=ScaleCalculationMode[self._scales],
            )
            converted.weight, converted.bias = plain.weight, plain.bias
            model.set_submodule(name, converted)
