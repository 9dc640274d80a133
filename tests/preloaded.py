"""What processes of tests are forked with: all that runs import as they come to need it, but would import in each."""

# ruff: noqa: F401
import torch._functorch.aot_autograd
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.profiler

import torchtitan.data.loader
import torchtitan.trainer
from torchtitan.config.parts import CHOICES
from torchtitan.transforms.quantized import torchao

with torchao():
    import torchao.float8
    import torchao.optim

    import torchtitan.distributed.float8

for _choice in CHOICES:
    _choice.registry.names()  # the built-in parts come with the first look
