"""Optimizers by name, and what each may be told.

Which of them updates which parameters is in ``groups.py``, rates over time in ``schedules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of this file
    from torch.optim import Optimizer

B = TypeVar("B", bound=Callable[..., Any])
Groups = list[dict[str, Any]]
"""What torch.optim takes: dicts with ``params`` and options of that group, ``lr`` always among them."""

OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer", home=__name__, receives=("groups",))


@dataclass(frozen=True)
class Takes:
    """The parameters that an optimizer can update: ``what`` they are in words, and whether a shape ``fits``."""

    what: str
    fits: Callable[[Sequence[int]], bool]


def takes_only(what: str, fits: Callable[[Sequence[int]], bool]) -> Callable[[B], B]:
    """Declare of the builder that follows which parameters its optimizer takes; a run with others is refused."""

    def mark(builder: B) -> B:
        builder.takes = Takes(what, fits)  # type: ignore[attr-defined]
        return builder

    return mark


def in_blocks(builder: B) -> B:
    """Declare that the optimizer of ``builder`` keeps states in blocks of its option ``block_size``, those of the
    parameters that are ``kept_in_blocks`` (``blocks.py``); a run whose ranks would cut a block is refused."""
    builder.in_blocks = True  # type: ignore[attr-defined]
    return builder


Beta = Annotated[float, Field(ge=0, lt=1)]
Beta1 = Annotated[Beta, Field(description="decay of the first moment")]
Beta2 = Annotated[Beta, Field(description="decay of the second moment")]
Eps = Annotated[float, Field(gt=0, description="added to the root of the second moment")]
LowBitEps = Annotated[
    # Where a second moment is rounded to nothing and the next gradient is zero, eps alone is what is divided by.
    float,
    Field(ge=1e-8, description="added to the root of the second moment"),
]
DecoupledDecay = Annotated[float, Field(ge=0, description="decoupled weight decay")]
Penalty = Annotated[float, Field(ge=0, description="L2 penalty, added to the gradient")]
BlockSize = Annotated[
    Literal[32, 64, 128, 256, 512], Field(description="numbers along a parameter's last dimension that share a scale")
]
Implementation = Annotated[
    Literal["for-loop", "foreach", "fused"],
    Field(description="one kernel a parameter, one over many parameters, or one for the whole update"),
]
LowBitImplementation = Annotated[
    Literal["for-loop", "compiled"],
    Field(description="one operation after the other, or by a graph: several times as fast once it is made"),
]


@OPTIMIZERS.register("AdamW")
def adamw(
    groups: Groups,
    *,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.95,
    eps: Eps = 1e-8,
    weight_decay: DecoupledDecay = 0.1,
    implementation: Implementation = "fused",
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    from torch.optim import AdamW

    return AdamW(groups, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, **_kernel(implementation))


@OPTIMIZERS.register("Adam")
def adam(
    groups: Groups,
    *,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.95,
    eps: Eps = 1e-8,
    weight_decay: Penalty = 0.1,
    implementation: Implementation = "fused",
) -> Optimizer:
    """Adam (Kingma and Ba 2015)."""
    from torch.optim import Adam

    return Adam(groups, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, **_kernel(implementation))


@OPTIMIZERS.register("SGD")
def sgd(
    groups: Groups,
    *,
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the last update that is kept; 0: none")] = 0.9,
    dampening: Annotated[float, Field(ge=0, le=1, description="share of the gradient left out of the momentum")] = 0.0,
    nesterov: Annotated[bool, Field(description="look ahead along the momentum")] = False,
    weight_decay: Penalty = 0.1,
    # PyTorch cannot spread its fused kernel over ranks.
    implementation: Annotated[
        Literal["for-loop", "foreach"], Field(description="one kernel a parameter, or one over many parameters")
    ] = "foreach",
) -> Optimizer:
    """Stochastic gradient descent with momentum (Sutskever et al. 2013, section 2)."""
    from torch.optim import SGD

    return SGD(
        groups,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        **_kernel(implementation),
    )


@OPTIMIZERS.register("Muon")
@takes_only("matrices", lambda shape: len(shape) == 2)
def muon(
    groups: Groups,
    *,
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the momentum in an update")] = 0.95,
    nesterov: Annotated[bool, Field(description="look ahead along the momentum")] = True,
    weight_decay: DecoupledDecay = 0.1,
    ns_steps: Annotated[int, Field(ge=1, lt=100, description="iterations that make a matrix orthogonal")] = 5,
    coefficients: Annotated[
        tuple[float, float, float], Field(description="of the first, third and fifth power in an iteration")
    ] = (3.4445, -4.775, 2.0315),
    eps: Annotated[float, Field(gt=0, description="smallest norm that a matrix is divided by")] = 1e-7,
    adjust_lr_fn: Annotated[
        Literal["original", "match_rms_adamw"],
        Field(description="rate by shape: times the root of rows / columns, or for updates as large as AdamW's"),
    ] = "original",
    orthogonalize_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="type of the iterations; bfloat16 turns rounding of gradients into half a percent of them"),
    ] = "float32",
) -> Optimizer:
    """Momentum made orthogonal, for matrices (Jordan et al. 2024)."""
    import torch

    from torchtitan.optim.muon import Muon

    return Muon(
        groups,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        ns_steps=ns_steps,
        coefficients=coefficients,
        eps=eps,
        adjust_lr_fn=adjust_lr_fn,
        dtype=getattr(torch, orthogonalize_dtype),
    )


@OPTIMIZERS.register("AdamW8bit")
@in_blocks
def adamw_8bit(
    groups: Groups,
    *,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.95,
    eps: LowBitEps = 1e-8,
    weight_decay: DecoupledDecay = 0.1,
    block_size: BlockSize = 128,
    implementation: LowBitImplementation = "for-loop",
) -> Optimizer:
    """AdamW whose moments are kept in 8 bits a number, of a dynamic type (Dettmers et al. 2022)."""
    return _low_bit_adam(
        groups,
        codes="dynamic",
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=True,
        block_size=block_size,
        compiled=implementation == "compiled",
    )


@OPTIMIZERS.register("AdamWFp8")
@in_blocks
def adamw_fp8(
    groups: Groups,
    *,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.95,
    eps: LowBitEps = 1e-8,
    weight_decay: DecoupledDecay = 0.1,
    block_size: BlockSize = 128,
    implementation: LowBitImplementation = "for-loop",
) -> Optimizer:
    """AdamW whose moments are kept in float8 e4m3 (after Dettmers et al. 2022)."""
    return _low_bit_adam(
        groups,
        codes="float8",
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=True,
        block_size=block_size,
        compiled=implementation == "compiled",
    )


@OPTIMIZERS.register("Adam8bit")
@in_blocks
def adam_8bit(
    groups: Groups,
    *,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.95,
    eps: LowBitEps = 1e-8,
    weight_decay: Penalty = 0.1,
    block_size: BlockSize = 128,
    implementation: LowBitImplementation = "for-loop",
) -> Optimizer:
    """Adam whose moments are kept in 8 bits a number, of a dynamic type (Dettmers et al. 2022)."""
    return _low_bit_adam(
        groups,
        codes="dynamic",
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=False,
        block_size=block_size,
        compiled=implementation == "compiled",
    )


@OPTIMIZERS.register("AdamFp8")
@in_blocks
def adam_fp8(
    groups: Groups,
    *,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.95,
    eps: LowBitEps = 1e-8,
    weight_decay: Penalty = 0.1,
    block_size: BlockSize = 128,
    implementation: LowBitImplementation = "for-loop",
) -> Optimizer:
    """Adam whose moments are kept in float8 e4m3 (after Dettmers et al. 2022)."""
    return _low_bit_adam(
        groups,
        codes="float8",
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=False,
        block_size=block_size,
        compiled=implementation == "compiled",
    )


def _low_bit_adam(groups: Groups, **options: Any) -> Optimizer:
    from torchtitan.optim.low_bit import LowBitAdam

    return LowBitAdam(groups, **options)


def _kernel(implementation: str) -> dict[str, bool]:
    return {"foreach": implementation == "foreach", "fused": implementation == "fused"}
