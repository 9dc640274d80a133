"""Float8 linear maps whose parts lie on several ranks: every scale is that of the whole tensor, as one process has it.

Which maps are float8, and by which recipe, is in ``transforms/float8.py``; casts and products are torchao's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax, to_fp8_saturated

from torchtitan.distributed.collectives import all_gather, joined, max_alike, reduce_scatter, split
from torchtitan.models.spec import Role

_INPUT, _WEIGHT, _GRAD = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT


@dataclass(frozen=True)
class _Casts:
    """To float8, of matrices of which a rank of ``group`` may hold some rows or columns.

    ``rows`` and ``columns`` name the operands that lie in parts along their first and their last dimension: the input
    ``[tokens, in]``, the weight ``[in, out]``, the gradient of the output ``[tokens, out]``.
    """

    config: Float8LinearConfig
    products: LinearMMConfig
    group: ProcessGroup
    rows: tuple[GemmInputRole, ...] = ()
    columns: tuple[GemmInputRole, ...] = ()

    def scale(self, matrix: Tensor, how: CastConfig, operand: GemmInputRole, dim: int) -> Tensor | None:
        """By which ``matrix`` is multiplied: where ``how`` says so, each of its rows or columns, whose elements lie
        along ``dim``, by its own. None if it is not cast, or is float8 already."""
        if how.scaling_type is ScalingType.DISABLED or isinstance(matrix, Float8TrainingTensor):
            return None
        by_tensor = how.scaling_granularity is ScalingGranularity.TENSORWISE
        amax = tensor_to_amax(matrix, scaling_granularity=how.scaling_granularity, axiswise_dim=_axis(how, dim))
        along_rows, along_columns = by_tensor or dim == 0, by_tensor or dim == -1
        if (along_rows and operand in self.rows) or (along_columns and operand in self.columns):
            amax = max_alike(amax.float(), self.group)
        scale: Tensor = amax_to_scale(amax, how.target_dtype, self.config.round_scales_to_power_of_2)
        return scale

    def cast(self, matrix: Tensor, scale: Tensor | None, how: CastConfig, operand: GemmInputRole, dim: int) -> Tensor:
        """``matrix`` in float8 by its ``scale``; as it is where there is none."""
        if scale is None:
            return matrix
        cast: Tensor = hp_tensor_and_scale_to_float8(
            matrix, scale, how.target_dtype, self.products, operand, _axis(how, dim)
        )
        return cast


def _axis(how: CastConfig, dim: int) -> int | None:
    return None if how.scaling_granularity is ScalingGranularity.TENSORWISE else dim


def _alike(one: CastConfig, other: CastConfig) -> bool:
    """Whether a tensor cast by ``one`` is the same cast by ``other``, whatever it is multiplied with."""
    return one == other and one.scaling_granularity is ScalingGranularity.TENSORWISE


class _Products(torch.autograd.Function):
    """``x`` ``[..., in]`` times ``weight`` ``[in, out]``, and the two products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, casts: _Casts) -> Tensor:
        config = casts.config
        matrix = x.reshape(-1, x.shape[-1])
        of_x = casts.scale(matrix, config.cast_config_input, _INPUT, -1)
        of_weight = casts.scale(weight, config.cast_config_weight, _WEIGHT, 0)
        ctx.save_for_backward(x, weight, of_x, of_weight)
        ctx.casts = casts
        out = torch.mm(
            casts.cast(matrix, of_x, config.cast_config_input, _INPUT, -1),
            casts.cast(weight, of_weight, config.cast_config_weight, _WEIGHT, 0),
        )
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        casts: _Casts = ctx.casts
        config = casts.config
        x, weight, of_x, of_weight = ctx.saved_tensors
        matrix, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1])

        how = config.cast_config_grad_output
        cast_grad = casts.cast(grad, casts.scale(grad, how, _GRAD, -1), how, _GRAD, -1)
        how = config.cast_config_weight_for_grad_input
        if not _alike(how, config.cast_config_weight):
            of_weight = casts.scale(weight, how, _WEIGHT, -1)
        grad_x = torch.mm(cast_grad, casts.cast(weight, of_weight, how, _WEIGHT, -1).t())

        how = config.cast_config_grad_output_for_grad_weight
        if not _alike(how, config.cast_config_grad_output):
            cast_grad = casts.cast(grad, casts.scale(grad, how, _GRAD, 0), how, _GRAD, 0)
        how = config.cast_config_input_for_grad_weight
        if not _alike(how, config.cast_config_input):
            of_x = casts.scale(matrix, how, _INPUT, 0)
        grad_weight = torch.mm(cast_grad.t(), casts.cast(matrix, of_x, how, _INPUT, 0))
        return grad_x.reshape(x.shape), grad_weight.t(), None


class _Spread(Float8Linear):
    """One that computes on this rank's part of its weight."""

    casts: _Casts

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Products.apply(input, self.weight.t(), self.casts)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def spread_float8(module: Any, role: Role, group: ProcessGroup) -> None:
    """Let ``module`` scale by whole tensors where ``group`` shares its outputs, in role "column" or "head", or its
    inputs, in role "row"."""
    config, products = module.config, module.linear_mm_config
    if role == "row":
        module.casts = _Casts(config, products, group, rows=(_WEIGHT,), columns=(_INPUT,))
    else:
        module.casts = _Casts(config, products, group, columns=(_WEIGHT, _GRAD))
    module.__class__ = _Spread


def gathers_float8(readers: Sequence[nn.Module]) -> bool:
    """Whether all ``readers`` would cast what they read alike, and by a scale for all of it."""
    return bool(readers) and all(
        isinstance(reader, _Spread)
        and _alike(reader.config.cast_config_input, reader.config.cast_config_input_for_grad_weight)
        for reader in readers
    )


def gather_float8(part: Tensor, dim: int, reader: Any) -> Tensor:
    """As ``gather_dim``, but rounded before as ``reader`` would round it, so that a byte an element is sent.

    What comes back is in the precision of ``part``. Its largest number is still the largest of all parts, so that
    readers scale and round it to the same bits again.
    """
    gathered: Tensor = _Gather.apply(part, dim, reader.casts)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, casts: _Casts) -> Tensor:
        ctx.dim, ctx.group = dim, casts.group
        how = casts.config.cast_config_input
        amax = max_alike(tensor_to_amax(part).float(), casts.group)
        scale = amax_to_scale(amax, how.target_dtype, casts.config.round_scales_to_power_of_2)
        sent = to_fp8_saturated(part.float() * scale, how.target_dtype).view(torch.uint8)
        whole: Tensor = joined(all_gather(sent, casts.group), dim).view(how.target_dtype).float() / scale
        # Compiled by torch 2.11, a function that ends in a cast of nothing has no gradient.
        return whole if whole.dtype == part.dtype else whole.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(split(grads[0], ctx.dim, ctx.group.size()), ctx.group), None, None
