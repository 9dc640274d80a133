"""What a rank holds of tensors that are spread like a parameter.

What optimizers compute on it is in ``optim/``; what a checkpoint reads into it, in ``checkpoint/``.
"""

import torch
import torch.distributed.tensor as spread
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.distributed.gradients import local_part
from torchtitan.optim.parts import Parts


class SpreadParts(Parts):
    """Of tensors that may be spread over ranks."""

    def local(self, tensor: Tensor) -> Tensor:
        return local_part(tensor)

    def zeros(self, parameter: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        if not isinstance(parameter, DTensor):
            return super().zeros(parameter, columns, dtype)
        zeros = spread.zeros(
            (*parameter.shape[:-1], columns),
            dtype=dtype,
            device_mesh=parameter.device_mesh,
            placements=parameter.placements,
        )
        return zeros.to(parameter.device)  # which may be the host of the mesh's devices
