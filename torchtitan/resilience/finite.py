"""Steps whose gradients are not finite: kept out of the weights, and the end of the run.

The norm itself is computed in ``distributed/gradients.py``.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan.optim.groups import Together


class NonFiniteError(ArithmeticError):
    """The gradients of ``step`` are not finite; weights and optimizer states are those from before it."""

    def __init__(self, step: int, norm: float) -> None:
        super().__init__(f"the gradient norm of step {step} is {norm}; the weights are those of the step before")
        self.step = step


class FiniteGuard:
    """Lets no step of ``optimizer`` change anything once a gradient norm was not finite.

    A norm on the host is looked at at once. To read one from a device is to wait for it: there the optimizer itself,
    if it can, withholds the step and all after it, as torch's fused ones do for a gradient scaler, and ``check`` tells
    of it later. All ranks have the same norm, so all do the same. ``deferred`` (None: as said) is for tests.
    """

    def __init__(self, optimizer: Optimizer, *, deferred: bool | None = None) -> None:
        self._optimizers = optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]
        self._withheld = all(getattr(each, "_step_supports_amp_scaling", False) for each in self._optimizers)
        self._deferred = deferred
        # The first step with such a norm, 0 for none yet; and the norm.
        self._step: Tensor | None = None
        self._norm: Tensor | None = None

    def admit(self, step: int, norm: Tensor) -> None:
        """Before the optimizer makes ``step``, whose gradients have this ``norm``; NonFiniteError if that is known to
        be not finite."""
        deferred = norm.device.type != "cpu" if self._deferred is None else self._deferred
        if not (deferred and self._withheld):
            if not norm.isfinite():
                raise NonFiniteError(step, norm.item())
            return
        if self._step is None or self._norm is None:
            self._step, self._norm = torch.zeros_like(norm), torch.zeros_like(norm)
        first = (self._step == 0) & ~norm.isfinite()
        self._step = self._step.masked_fill(first, step)
        self._norm = torch.where(first, norm, self._norm)
        for optimizer in self._optimizers:
            optimizer.found_inf = (self._step != 0).float()  # type: ignore[attr-defined]

    def check(self) -> None:
        """NonFiniteError if a step was withheld. This waits for the device."""
        if self._step is not None and self._norm is not None and self._step:
            raise NonFiniteError(int(self._step), float(self._norm))
