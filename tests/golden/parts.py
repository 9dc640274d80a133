"""A model that draws random numbers in each step; named in ``job.imports``."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.decoder import decoder_spec
from torchtitan.models.llama3 import FLAVORS, TWIN, Llama3, Llama3Args
from torchtitan.models.spec import MODELS


class Forgetful(Llama3):
    """Llama 3 with a dropout behind each block."""

    def __init__(self, args: Llama3Args) -> None:
        super().__init__(args)
        for block in self.layers.values():
            block.register_forward_hook(drop)


def drop(block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return F.dropout(output, 0.2, training=block.training)


MODELS.register("forgetful", decoder_spec(Forgetful, Llama3Args, {"debugmodel": FLAVORS["debugmodel"]}, TWIN))
