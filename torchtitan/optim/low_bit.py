"""Adam that keeps its moments in eight bits a number, each block of numbers with a scale of its own.

How a run's ranks hold parameters is not known here (``parts.py``); which parameters are kept so is
said in ``blocks.py``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchtitan.errors import ConfigError
from torchtitan.log import no_warnings
from torchtitan.optim.blocks import kept_in_blocks
from torchtitan.optim.parts import LocalOptimizer

Codes = Literal["dynamic", "float8"]

_PIECE, _PIECE_ON_CPU = 2**23, 2**17
"""Numbers that are updated at once: on the way each takes a hundred bytes, which a CPU likes to have in its cache."""


class LowBitAdam(LocalOptimizer):
    """Adam (Kingma and Ba 2015), with decoupled weight decay or without, whose moments are quantized block by block
    between steps (Dettmers et al. 2022, arXiv:2110.02861, section 2).

    Of a parameter ``[..., columns]`` it keeps ``exp_avg_codes`` and ``exp_avg_sq_codes``, of its shape, and
    ``exp_avg_scale`` and ``exp_avg_sq_scale``, ``[..., columns / block_size]`` in float32, all spread like the
    parameter, and ``step``. Of one that is not kept in blocks it keeps ``exp_avg`` and ``exp_avg_sq`` in float32.
    ``codes`` are of the dynamic type of that paper or float8 e4m3, ``block_size`` numbers along the columns share a
    scale. An update is computed in float32, from moments that are not rounded yet.
    """

    _step_supports_amp_scaling = True  # as torch's own say that they read found_inf
    found_inf: Tensor | None = None
    """Where it is not zero, on the device, a step changes nothing."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        codes: Codes,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        block_size: int,
        compiled: bool = False,
    ) -> None:
        # The number of steps lies on the device, which torch calls capturable.
        super().__init__(params, {"betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": True})
        self._codes, self._decoupled, self._block = codes, decoupled, block_size
        self._compute = _compiled if compiled else _updated

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # As a tensor, which a graph need not be compiled for again, and filled without waiting.
                    rate = torch.full((), group["lr"], dtype=torch.float32, device=parameter.device)
                    self._update(parameter, parameter.grad, rate, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, rate: Tensor, group: Mapping[str, Any]) -> None:
        in_blocks, device = kept_in_blocks(parameter.shape, self._block), parameter.device
        keeping: _Keeping = _keeping(self._codes, self._block, device) if in_blocks else _Whole()
        state = self._state_of(parameter, keeping)
        state["step"] += 1 if self.found_inf is None else self.found_inf == 0
        # Blocks lie along the columns, and no rank holds a part of one: the list of all blocks may be cut anywhere.
        block, local = keeping.block, self.parts.local
        tensors = [local(parameter).detach().view(-1, block), local(gradient).reshape(-1, block)]
        tensors += [local(state[key]).view(-1, block // numbers) for key, (numbers, _) in keeping.tensors().items()]
        if not tensors[0].numel():
            return  # more ranks than rows
        size = _PIECE_ON_CPU if device.type == "cpu" else _PIECE
        compute = self._compute if in_blocks else _updated
        betas, decoupled = tuple(group["betas"]), self._decoupled
        for value, grad, *kept in zip(*(tensor.split(size // block) for tensor in tensors), strict=True):
            new = compute(
                keeping, value, grad, kept, rate, state["step"], betas, group["eps"], group["weight_decay"], decoupled
            )
            for tensor, after in zip((value, *kept), new, strict=True):
                self._write(tensor, after)

    def _state_of(self, parameter: Tensor, keeping: _Keeping) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        expected = {key: (parameter.shape[-1] // n, dtype) for key, (n, dtype) in keeping.tensors().items()}
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state.update({key: self.parts.zeros(parameter, *of) for key, of in expected.items()})
        if {key: (kept.shape[-1], kept.dtype) for key, kept in state.items() if key != "step"} != expected:
            raise ConfigError(
                "optimizer.block_size",
                f"{self._block} is not what the checkpoint's states were kept with; keep that, or start them anew with "
                'checkpoint.exclude_from_loading = ["optimizer"]',
            )
        return state

    def _write(self, tensor: Tensor, new: Tensor) -> None:
        new = new.view_as(tensor).to(tensor.dtype)
        tensor.copy_(new if self.found_inf is None else torch.where(self.found_inf == 0, new, tensor))


def _updated(
    keeping: _Keeping,
    value: Tensor,
    gradient: Tensor,
    kept: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
) -> tuple[Tensor, ...]:
    """Some numbers of a parameter, and what is kept of their moments, after ``step``, from those before it."""
    (beta1, beta2), half = betas, len(kept) // 2
    first, second = keeping.decode(kept[:half], signed=True), keeping.decode(kept[half:], signed=False)
    value, gradient = value.float(), gradient.float()
    if decoupled:
        value = value - lr * decay * value
    else:
        gradient = gradient + decay * value
    first = first.lerp(gradient, 1 - beta1)
    second = second.lerp(gradient.square(), 1 - beta2)
    denominator = second.sqrt() / (1 - beta2**step).sqrt() + eps
    value = value - lr * (first / (1 - beta1**step)) / denominator
    return value, *keeping.encode(first, signed=True), *keeping.encode(second, signed=False)


@functools.cache
def _graph() -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(_updated, fullgraph=True)


def _compiled(*inputs: Any) -> tuple[Tensor, ...]:
    return _graph()(*inputs)


class _Keeping(Protocol):
    """How a moment is kept between steps, in blocks ``[blocks, block]``."""

    block: int

    def tensors(self) -> Mapping[str, tuple[int, torch.dtype]]:
        """Of both moments, by their keys in a state: how many numbers an element stands for, and its type."""
        ...

    def decode(self, kept: Sequence[Tensor], *, signed: bool) -> Tensor: ...

    def encode(self, moment: Tensor, *, signed: bool) -> tuple[Tensor, ...]: ...


class _Whole:
    """As it is, in float32."""

    block = 1

    def tensors(self) -> Mapping[str, tuple[int, torch.dtype]]:
        return {"exp_avg": (1, torch.float32), "exp_avg_sq": (1, torch.float32)}

    def decode(self, kept: Sequence[Tensor], *, signed: bool) -> Tensor:
        return kept[0]

    def encode(self, moment: Tensor, *, signed: bool) -> tuple[Tensor, ...]:
        return (moment,)


class _InBlocks:
    """As codes and a scale for each block; what torchao computes for them, on tensors of our own that can be spread."""

    def __init__(self, block: int, dtype: torch.dtype) -> None:
        self.block, self._dtype = block, dtype

    def tensors(self) -> Mapping[str, tuple[int, torch.dtype]]:
        parts = {"codes": (1, self._dtype), "scale": (self.block, torch.float32)}
        return {f"{moment}_{part}": of for moment in ("exp_avg", "exp_avg_sq") for part, of in parts.items()}


class _Dynamic(_InBlocks):
    def __init__(self, block: int, device: torch.device) -> None:
        super().__init__(block, torch.uint8)
        self._torchao = _torchao("quant_utils")
        self._map = {
            signed: torch.tensor(self._torchao.create_dynamic_map(signed), device=device) for signed in (True, False)
        }

    def decode(self, kept: Sequence[Tensor], *, signed: bool) -> Tensor:
        codes, scale = kept
        decoded: Tensor = self._torchao.dequant_with_qmap(codes, self._map[signed], scale)
        return decoded

    def encode(self, moment: Tensor, *, signed: bool) -> tuple[Tensor, ...]:
        scaled, scale = self._torchao.scale_tensor(moment, self.block)
        return self._torchao.quantize_8bit_with_qmap(scaled, self._map[signed]), scale


class _Float8(_InBlocks):
    def __init__(self, block: int, device: torch.device) -> None:
        super().__init__(block, torch.float8_e4m3fn)
        self._torchao = _torchao("subclass_fp8")

    def decode(self, kept: Sequence[Tensor], *, signed: bool) -> Tensor:
        codes, scale = kept
        return codes.float() * scale

    def encode(self, moment: Tensor, *, signed: bool) -> tuple[Tensor, ...]:
        codes, scale = self._torchao.quantize_fp8(moment, self.block)
        return codes, scale


@functools.cache
def _keeping(codes: Codes, block: int, device: torch.device) -> _Dynamic | _Float8:
    """One for all parameters: its tables lie on the device."""
    return _Dynamic(block, device) if codes == "dynamic" else _Float8(block, device)


def _torchao(name: str) -> Any:
    """A module of its optimizers, without what it says of kernels that this machine has not, and nobody here uses."""
    with no_warnings("torchao", "torch.utils._pytree"):
        return importlib.import_module(f"torchao.optim.{name}")
