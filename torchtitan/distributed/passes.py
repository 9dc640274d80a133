"""What may be asked of the passes through a block, checked before any process starts.

How blocks are compiled is in ``compile.py``, how they compute again what they do not keep in
``activation_checkpoint.py``.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

import torch

from torchtitan.config.schema import ActivationCheckpoint, Compile
from torchtitan.distributed.spread import Spread
from torchtitan.errors import ConfigError
from torchtitan.models.spec import Layout
from torchtitan.registry import unknown_name

_USUAL_BACKENDS = {"inductor", "aot_eager"}
_FORCED = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
_DEFAULT_FORCED = ActivationCheckpoint().per_op_sac_force_recompute_mm_shapes_by_fqns


def check_compile(keys: Compile, spread: Spread, *, on_cpu: bool) -> None:
    """ConfigError for what ``keys`` cannot be had with, looking for nothing unless ``keys.enable``."""
    if not keys.enable:
        return
    plan = spread.pipeline
    if plan is not None and plan.splits_backward:
        raise ConfigError(
            "compile.enable",
            f"the pipeline's {plan.schedule} computes gradients of inputs and of weights apart, and a compiled block "
            "would compute both each time; take another parallelism.pipeline_parallel_schedule, or leave it at false",
        )
    if keys.backend not in _USUAL_BACKENDS and keys.backend not in (
        known := torch.compiler.list_backends(exclude_tags=())  # takes seconds
    ):
        raise unknown_name("backend", keys.backend, known, key="compile.backend")
    if keys.backend == "inductor" and on_cpu:
        check_compiler("compile.backend", 'or set it to "aot_eager", which needs none and makes nothing faster')


def check_compiler(key: str, otherwise: str) -> None:
    """ConfigError, on ``key``, where what inductor makes for a CPU could not be compiled."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            key,
            f"inductor needs a C++ compiler on a CPU, and there is no {compiler}; install one, say where it is in the "
            f"environment variable CXX, {otherwise}",
        )


def check_activation_checkpoint(
    keys: ActivationCheckpoint, spread: Spread, layout: Layout, parameters: Mapping[str, Sequence[int]]
) -> None:
    """ConfigError for what ``keys`` ask for and cannot be had. ``parameters`` of the model are shapes by name."""
    if keys.mode == "memory_budget" and spread.degrees.tensor > 1:
        raise ConfigError(
            "activation_checkpoint.mode",
            "torch's compiler cannot compute again what it got of parameters that tensor ranks share; take "
            '"selective" or "full", or parallelism.tensor_parallel_degree=1',
        )
    if not keys.per_op:
        return
    plan = spread.pipeline
    if plan is not None and plan.splits_backward:
        raise ConfigError(
            "activation_checkpoint.selective_ac_option",
            f"what op keeps is used up by one backward pass, and the pipeline's {plan.schedule} makes two; set it to a "
            'number, or activation_checkpoint.mode to "full"',
        )
    maps = [name for name, shape in parameters.items() if name.startswith(f"{layout.blocks}.") and len(shape) == 2]
    if keys.per_op_sac_force_recompute_mm_shapes_by_fqns != _DEFAULT_FORCED:
        for part in keys.per_op_sac_force_recompute_mm_shapes_by_fqns:
            if not any(part in name.rpartition(".")[0] for name in maps):
                raise ConfigError(
                    _FORCED, f"no linear map has {part!r} in its name; names look like {maps[0].rpartition('.')[0]}"
                )
