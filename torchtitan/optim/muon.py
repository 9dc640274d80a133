"""Muon: momentum whose matrices are orthogonalised before they are applied.

Which ranks do that is not known here; see ``whole.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan.optim.whole import Task, WholeMatrixOptimizer


class Muon(WholeMatrixOptimizer):
    """The update of torch.optim.Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), with the type of
    the iterations to choose, on parameters ``[rows, columns]`` whole or spread over ranks.

    Momentum is kept as ``momentum_buffer``, spread like the parameter. ``adjust_lr_fn``: "original" multiplies the rate
    by √max(1, rows / columns), "match_rms_adamw" by 0.2 √max(rows, columns), so that an update is as large as AdamW's
    (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        ns_steps: int,
        coefficients: Sequence[float],
        eps: float,
        adjust_lr_fn: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(params, {"weight_decay": weight_decay})
        self._momentum, self._nesterov = momentum, nesterov
        self._adjust = _ADJUST[adjust_lr_fn]
        self._orthogonalize = partial(orthogonalize, steps=ns_steps, coefficients=coefficients, eps=eps, dtype=dtype)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.map_whole(
            [
                Task(
                    parameter,
                    direction=partial(self._direction, parameter),
                    compute=self._orthogonalize,
                    update=partial(self._update, parameter, group["lr"], group["weight_decay"]),
                    dtype=self._dtype,
                    cost=float(min(parameter.shape) * parameter.numel()),
                )
                for group in self.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
        )
        return loss

    def _direction(self, parameter: Tensor) -> Tensor:
        """The momentum with this step's gradient in it."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(parameter.grad, 1 - self._momentum)
        return parameter.grad.lerp(momentum, self._momentum) if self._nesterov else momentum

    def _update(self, parameter: Tensor, lr: float, weight_decay: float, orthogonal: Tensor) -> None:
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(orthogonal, alpha=-lr * self._adjust(*parameter.shape))


_ADJUST: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def orthogonalize(
    matrix: Tensor, *, steps: int, coefficients: Sequence[float], eps: float, dtype: torch.dtype
) -> Tensor:
    """Singular values of ``matrix``, ``[rows, columns]``, moved to about one, 0.7 to 1.2 with the usual coefficients.

    ``steps`` iterations X ← aX + (bA + cA²)X, where A = XXᵀ, in ``dtype``, which the result has too (Jordan et al.
    2024). ``eps`` is the smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
