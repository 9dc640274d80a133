"""Context parallelism: each rank holds a part of every row, and attention reaches the keys and values of the others.

How attention itself is computed is in ``models/attention.py``; meshes and the order of parallelisms are elsewhere.

"gather" collects keys and values, and a rank's queries meet their prefix of them (The Llama 3 Herd of Models, section
3.3.2); "ulysses" exchanges a part of the sequence for a part of the heads and back (DeepSpeed-Ulysses, 2023).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.data.batch import Batch
from torchtitan.distributed.collectives import all_gather, reduce_scatter
from torchtitan.distributed.spread import MaskKind, Method
from torchtitan.distributed.topology import Axis
from torchtitan.models.attention import CausalMask, DocumentMask, document_mask, document_starts
from torchtitan.models.spec import Layout


@dataclass(frozen=True)
class ContextSplit:
    """Which tokens of each row a rank holds, and how attention reaches the others.

    With ``head_tail``, rank r of n holds chunks r and 2n-1-r of 2n, so that all ranks have as many keys to meet under
    a causal mask; otherwise the r-th of n shares. "ulysses" evens the work out by itself and always takes shares.
    """

    axis: Axis
    method: Method
    head_tail: bool

    @property
    def chunks(self) -> tuple[int, ...]:
        """Which chunks of a row this rank holds, in order; a row has ``len(chunks)`` times as many as ranks."""
        return self._chunks_of(self.axis.rank)

    def _chunks_of(self, rank: int) -> tuple[int, ...]:
        if self.head_tail and self.method == "gather":
            return rank, 2 * self.axis.size - 1 - rank
        return (rank,)

    def _all_chunks(self, row: Tensor) -> tuple[Tensor, ...]:
        count = len(self.chunks) * self.axis.size
        if row.shape[1] % count:
            # Unequal parts would end the process inside of a collective.
            raise ValueError(f"rows of {row.shape[1]} tokens do not split into {count} chunks of equal length")
        return row.chunk(count, dim=1)

    def take(self, batch: Batch) -> Batch:
        """This rank's tokens, labels and positions, ``[batch, seq / ranks]`` each, with their values unchanged.

        ValueError where rows do not split evenly; ``spread.check_context`` says so before.
        """
        return Batch(self._part(batch.tokens), self._part(batch.labels), self._part(batch.positions))

    def _part(self, row: Tensor) -> Tensor:
        chunks = self._all_chunks(row)
        return torch.cat([chunks[c] for c in self.chunks], dim=1)

    def index(self, length: int, device: torch.device) -> Tensor:
        """Where in the row this rank's ``length`` tokens stand, int32 ``[length]``."""
        size = length // len(self.chunks)
        within = torch.arange(size, dtype=torch.int32, device=device)
        return torch.cat([within + c * size for c in self.chunks])

    def gather(self, *parts: Tensor) -> list[Tensor]:
        """Rows ``[batch, seq, ...]`` of which all ranks pass their parts ``[batch, seq / ranks, ...]``; parts of equal
        shape share one collective. Gradients stop here."""
        held = len(self.chunks)
        own = torch.stack([piece for part in parts for piece in part.chunk(held, dim=1)]).contiguous()
        out = all_gather(own, self.axis.group)
        pieces: dict[tuple[int, int], Tensor] = {}  # (which of the parts, chunk) → tokens
        for rank, of_rank in enumerate(out):
            keys = [(t, c) for t in range(len(parts)) for c in self._chunks_of(rank)]
            pieces.update(zip(keys, of_rank.unbind(), strict=True))
        order = range(held * self.axis.size)
        return [torch.cat([pieces[t, c] for c in order], dim=1) for t in range(len(parts))]

    def scatter_sum(self, *rows: Tensor) -> list[Tensor]:
        """This rank's parts ``[batch, seq / ranks, ...]`` of the sums over ranks of ``rows`` ``[batch, seq, ...]``:
        the transpose of ``gather``."""
        split = [self._all_chunks(row) for row in rows]
        ranks = range(self.axis.size)
        blocks = torch.stack([chunks[c] for r in ranks for chunks in split for c in self._chunks_of(r)])
        own = reduce_scatter(blocks.unflatten(0, (self.axis.size, -1)), self.axis.group)
        return [torch.cat(pieces.unbind(), dim=1) for pieces in own.chunk(len(rows))]


class _GatherKeysValues(torch.autograd.Function):
    """Keys and values of this rank's tokens → those of whole rows. Every rank's queries meet them, so the gradient of
    a key is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, split: ContextSplit) -> tuple[Tensor, ...]:
        ctx.split = split
        return tuple(split.gather(k, v))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.split.scatter_sum(*grads), None


class _Exchange(torch.autograd.Function):
    """Block j of rank i along ``split`` → block i of rank j along ``join``, two dimensions of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        return _exchange(x, axis, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.axis, ctx.join, ctx.split), None, None, None


def _exchange(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    blocks = torch.stack(x.chunk(axis.size, dim=split)).contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=axis.group)
    # Compiled by torch 2.11, a function that returns what was written in place has no gradient: this must be a copy.
    return torch.cat(out.unbind(), dim=join)


class GatheredAttention(nn.Module):
    """``inner`` for this rank's queries ``[batch, seq / ranks, heads, head_dim]`` and the keys and values of all.

    ``allowed`` is None, or for each chunk of queries the keys that it meets, up to the chunk's end.
    """

    def __init__(self, inner: nn.Module, split: ContextSplit) -> None:
        super().__init__()
        self.inner = inner
        self.split = split

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: tuple[Any, ...] | None) -> Tensor:
        k, v = _GatherKeysValues.apply(k, v, self.split)
        outs = []
        for i, (chunk, queries) in enumerate(zip(self.split.chunks, q.chunk(len(self.split.chunks), 1), strict=True)):
            end = (chunk + 1) * queries.shape[1]
            outs.append(self.inner(queries, k[:, :end], v[:, :end], None if allowed is None else allowed[i]))
        return torch.cat(outs, dim=1)


class ExchangedAttention(nn.Module):
    """``inner`` over whole rows for this rank's share of the heads; in and out ``[batch, seq / ranks, heads,
    head_dim]``, all heads."""

    def __init__(self, inner: nn.Module, split: ContextSplit) -> None:
        super().__init__()
        self.inner = inner
        self.axis = split.axis

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: Any) -> Tensor:
        # One exchange for all three: the heads of a rank stand together, its queries before its keys and values.
        shares = [x.unflatten(2, (self.axis.size, -1)) for x in (q, k, v)]
        rows = _Exchange.apply(torch.cat(shares, dim=3).flatten(2, 3), self.axis, 2, 1)
        q, k, v = rows.split([share.shape[3] for share in shares], dim=2)
        return _Exchange.apply(self.inner(q, k, v, allowed), self.axis, 1, 2)


class SplitDocumentMask(nn.Module):
    """This rank's positions ``[batch, seq / ranks]`` that restart in every document → which keys each query meets.

    "gather": for each chunk of this rank's queries the ``document_mask`` over the keys up to its end; "ulysses": that
    of whole rows.
    """

    def __init__(self, split: ContextSplit) -> None:
        super().__init__()
        self.split = split

    def forward(self, positions: Tensor) -> Any:
        own = self.split.index(positions.shape[1], positions.device)
        starts = document_starts(positions, own)
        if self.split.method == "ulysses":
            (starts,) = self.split.gather(starts)
            length = starts.shape[1]
            return document_mask(torch.arange(length, dtype=torch.int32, device=starts.device), starts, length)
        chunks = self.split.chunks
        parts = zip(chunks, own.chunk(len(chunks)), starts.chunk(len(chunks), dim=1), strict=True)
        return tuple(document_mask(index, begins, (chunk + 1) * len(index)) for chunk, index, begins in parts)


def apply_mask(model: nn.Module, layout: Layout, mask: MaskKind) -> None:
    """Let every token of a whole row meet those before it, all of them or those of its document."""
    model.set_submodule(layout.mask, CausalMask() if mask == "causal" else DocumentMask())


def apply_context_parallel(model: nn.Module, layout: Layout, split: ContextSplit, mask: MaskKind) -> None:
    """Wrap the attention of every block and set the model's mask, so that ``model`` runs on what ``split.take`` gives.

    Parameters and their names stay. Gradients of the weights are then of this rank's tokens, to be summed over
    the axis.
    """
    wrapper = GatheredAttention if split.method == "gather" else ExchangedAttention
    for block in model.get_submodule(layout.blocks).children():
        block.set_submodule(layout.attention, wrapper(block.get_submodule(layout.attention), split))
    model.set_submodule(layout.mask, CausalMask() if mask == "causal" else SplitDocumentMask(split))
