"""Data parallelism: parameters, gradients and optimizer states sharded over ranks by FSDP2, in every run.

A single rank is a mesh of one, replicas are a second mesh dimension: there is no other kind of data parallelism and
no other place for mixed precision.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan.distributed.spread import Reshard
from torchtitan.models.spec import Layout


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run: ``storage`` of parameters and optimizer states, ``param`` of compute, ``reduce`` of gradients
    on their way between ranks."""

    storage: torch.dtype = torch.float32
    param: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def apply_fsdp(
    model: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    precision: Precision,
    reshard: Reshard,
    cpu_offload: bool,
    tied: bool,
    keep_head: bool = False,
) -> None:
    """Shard each block, the stem and the head of ``model`` in place; gradients are summed, never averaged.

    ``model`` may be a part of one. With ``reshard`` "default" and "always" a block's full weights are freed after its
    forward pass. ``keep_head`` leaves those of the head where they are until their backward pass in any case, for a
    loss that reads them.
    """
    # The local part of a spread tensor is a view; nothing here changes an activation in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param,
        reduce_dtype=precision.reduce,
        # Activations already have the dtype of the weights; what is float32 on purpose (rotary tables) must stay so.
        cast_forward_inputs=False,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    free = reshard != "never"
    free_head = reshard == "always" and not keep_head

    def shard(modules: list[nn.Module], reshard_after_forward: bool) -> None:
        fully_shard(
            modules, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, offload_policy=offload
        )

    for block in model.get_submodule(layout.blocks).children():
        shard([block], free)
    # A tied weight is used by stem and head alike, so it belongs to the group of the whole model.
    if not tied:
        for name in layout.stem:
            if _has_parameters(module := model.get_submodule(name)):
                shard([module], free)
        head = [module for name in layout.head if _has_parameters(module := model.get_submodule(name))]
        if head:
            # The backward pass needs the head first: freeing it after the forward pass would only fetch it twice.
            shard(head, free_head)
    shard([model], free_head if tied else reshard == "always")
    if mesh.size() > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by the global number of tokens already. The factor 1 alone would ask gloo for a
                # scaled sum, which it does not have.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
