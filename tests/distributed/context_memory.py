"""What a block keeps for its backward pass on a rank, in bytes; gathered keys and values counted apart."""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.context import ContextSplit, apply_context_parallel, apply_mask
from torchtitan.distributed.spread import Method
from torchtitan.distributed.topology import Axis
from torchtitan.distributed.world import World
from torchtitan.models.llama3 import Llama3, Llama3Args
from torchtitan.models.spec import MODELS

ARGS = Llama3Args(dim=512, n_layers=1, n_heads=8, n_kv_heads=4, vocab_size=64, multiple_of=64)
METHODS: dict[str, tuple[Method, bool]] = {
    "gather, head-tail": ("gather", True),
    "gather, contiguous": ("gather", False),
    "ulysses": ("ulysses", False),
}


@dataclass(frozen=True)
class Usage:
    """Bytes on a rank: queries, keys and values; what attention saves beside them; gathered keys and values; what the
    whole block saves without the latter."""

    inputs: int
    attention: int
    gathered: int
    block: int


@dataclass
class Saved:
    """Storages that autograd keeps, but those of ``known`` tensors."""

    known: list[Tensor]
    storages: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {t.untyped_storage().data_ptr() for t in self.known}:
            self.storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    def total(self) -> int:
        return sum(size for size, _ in self.storages.values())


def usage(world: World, seq_len: int, dtype: torch.dtype) -> dict[str, Usage]:
    """For each method; in a world of one rank, for one process."""
    cases = METHODS if world.size > 1 else {"one process": ("gather", False)}
    return {name: _usage(world, seq_len, dtype, *case) for name, case in cases.items()}


def _usage(world: World, seq_len: int, dtype: torch.dtype, method: Method, head_tail: bool) -> Usage:
    model = Llama3(ARGS).to(dtype)
    layout = MODELS.get("llama3").layout
    if world.size == 1:
        apply_mask(model, layout, "causal")
    else:
        assert dist.group.WORLD is not None
        split = ContextSplit(Axis(dist.group.WORLD, world.rank, world.size), method, head_tail)
        apply_context_parallel(model, layout, split, "causal")
    local, block = seq_len // world.size, model.layers["0"]
    q = torch.randn(1, local, 8, 64, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, local, 4, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    cos, sin = model.rope(torch.arange(local).unsqueeze(0))
    x = torch.randn(1, local, 512, dtype=dtype, requires_grad=True)
    gathered: list[Tensor] = []
    gather = ContextSplit.gather

    def recorded(self: ContextSplit, *parts: Tensor) -> list[Tensor]:
        whole = gather(self, *parts)
        gathered.extend(whole)
        return whole

    def saved(run: Any, *inputs: Tensor) -> tuple[int, int]:
        """Bytes that ``run`` saves beside ``inputs``, and of keys and values that it gathers."""
        gathered.clear()
        kept = Saved([*inputs, *model.parameters()])
        with (
            mock.patch.object(ContextSplit, "gather", recorded),
            torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor),
        ):
            run(*inputs, None)
        apart = {t.untyped_storage().data_ptr() for t in gathered} & set(kept.storages)
        size = sum(kept.storages[pointer][0] for pointer in apart)
        return kept.total() - size, size

    attention, of_others = saved(block.attention.inner_attention, q, k, v)
    whole_block, _ = saved(block, x, cos, sin)
    return Usage(sum(t.nbytes for t in (q, k, v)), attention, of_others, whole_block)
