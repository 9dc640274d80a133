"""Attention against its definition in float64, which keys a query meets, and what is kept for the backward pass."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from tests.conftest import NO_GPU
from torchtitan.models import attention
from torchtitan.models.attention import (
    CausalMask,
    DocumentMask,
    InnerAttention,
    block_mask,
    causal_attention,
    dense_mask,
    document_starts,
    masked_attention,
)


def defined(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of scaled scores of the allowed keys, times the values, with every head of keys written out."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def inputs(queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, queries, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)]
    return [(1.5 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_() for shape in shapes]


def lower_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"), [(9, 9, 4, 4), (9, 9, 4, 2), (5, 12, 4, 4), (3, 17, 6, 2), (1, 7, 2, 1)]
)
def test_causal_attention_is_its_definition(queries: int, keys: int, heads: int, kv_heads: int) -> None:
    q, k, v = inputs(queries, keys, heads, kv_heads)
    expected = defined(q, k, v, lower_right(queries, keys))
    assert torch.allclose(causal_attention(q, k, v), expected, rtol=0, atol=1e-12)
    torch.autograd.gradcheck(causal_attention, (q, k, v), fast_mode=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_masked_attention_is_its_definition(heads: int, kv_heads: int) -> None:
    q, k, v = inputs(5, 12, heads, kv_heads)
    allowed = torch.rand(2, 1, 5, 12) < 0.5
    allowed[1, :, 3] = False
    out = masked_attention(q, k, v, allowed)
    assert torch.allclose(out, defined(q, k, v, allowed), rtol=0, atol=1e-12)
    assert not out[1, 3].any(), "a query that meets no key gives zeros"
    torch.autograd.gradcheck(functools.partial(masked_attention, allowed=allowed), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("queries", [12, 5])
def test_bfloat16_is_as_near_as_its_rounding(queries: int) -> None:
    exact = inputs(queries, 12, 4, 2)
    rounded = inputs(queries, 12, 4, 2, torch.bfloat16)
    expected, out = causal_attention(*exact), causal_attention(*rounded)
    expected.sum().backward()
    out.sum().backward()
    for got, wanted in [(out, expected), *((x.grad, y.grad) for x, y in zip(rounded, exact, strict=True))]:
        assert got is not None and wanted is not None and got.dtype == torch.bfloat16
        assert float(((got - wanted).norm() / wanted.norm()).detach()) < 2e-2  # eps of bfloat16 is 8e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_it_gives_the_same(masked: bool, dtype: torch.dtype) -> None:
    allowed = lower_right(5, 12).expand(2, 1, 5, 12) if masked else None
    inner = InnerAttention()
    results = []
    for attend in (inner, torch.compile(inner, backend="aot_eager", fullgraph=True)):
        qkv = inputs(5, 12, 4, 2, dtype)
        # Nothing that stands in a larger graph is a leaf.
        out = attend(*(2 * x for x in qkv), allowed)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in qkv)])
    for eager, compiled in zip(*results, strict=True):
        assert eager.any() and torch.equal(eager, compiled)


def saved_bytes(queries: int, keys: int, allowed: Tensor | None) -> int:
    """What attention keeps for its backward pass beside queries, keys, values and mask."""
    q, k, v = inputs(queries, keys, 4, 4, torch.float32)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, allowed) if x is not None}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        InnerAttention()(q, k, v, allowed)
    return sum(kept.values())


@pytest.mark.parametrize("masked", [False, True])
def test_no_copy_of_a_mask_is_kept_for_the_backward_pass(masked: bool) -> None:
    allowed = lower_right(64, 256).expand(2, 1, 64, 256) if masked else None
    out, log_sum = 2 * 64 * 4 * 8 * 4, 2 * 64 * 4 * 4
    assert saved_bytes(64, 256, allowed) == out + log_sum


def test_other_devices_take_the_public_call() -> None:
    q, k, v = (x.detach().to("meta") for x in inputs(5, 12, 4, 2))
    assert causal_attention(q, k, v).shape == q.shape
    assert masked_attention(q, k, v, torch.ones(2, 1, 5, 12, dtype=torch.bool, device="meta")).shape == q.shape


def test_masks_say_which_keys_a_query_meets() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])
    documents = [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]]
    allowed = DocumentMask()(positions)
    assert allowed.dtype == torch.bool and allowed.shape == (2, 1, 6, 6)
    for row in range(2):
        for q in range(6):
            for k in range(6):
                assert allowed[row, 0, q, k] == (k <= q and documents[row][q] == documents[row][k])
    assert CausalMask()(positions) is None


def queries(rows: list[list[int]], begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Where the tokens ``begin`` to ``end`` of rows of documents of given lengths stand, and their documents begin."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    index = torch.arange(begin, end, dtype=torch.int32)
    return index, document_starts(positions[:, begin:end], index)


# Documents over 1000 tokens, of less than a block of 128, along its edges; and which part of the row the queries are.
ROWS = [[1000], [5, 123, 128, 256, 1, 1, 486], [300, 50, 50, 200, 400]]
PARTS = [(0, 1000), (0, 250), (250, 500), (512, 768), (999, 1000)]


@pytest.mark.parametrize(("begin", "end"), PARTS)
def test_blocks_of_a_mask_are_those_of_the_dense_one(begin: int, end: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    index, starts = queries(ROWS, begin, end)
    blocks = block_mask(index, starts, end)
    shape = (len(ROWS), 1, end - begin, end)
    dense = create_mask(blocks.mask_mod, *shape, device="cpu")
    assert torch.equal(dense, dense_mask(index, starts, end))
    expected = create_block_mask(blocks.mask_mod, *shape, device="cpu")
    assert blocks.shape == expected.shape == shape
    lists = [(blocks.kv_num_blocks, blocks.kv_indices), (expected.kv_num_blocks, expected.kv_indices)]
    whole = [(blocks.full_kv_num_blocks, blocks.full_kv_indices)]
    whole += [(expected.full_kv_num_blocks, expected.full_kv_indices)]
    for got, wanted in (lists, whole):
        for some in itertools.product(*map(range, got[0].shape)):  # type: ignore[union-attr]
            number = int(wanted[0][some])  # type: ignore[index]
            assert int(got[0][some]) == number  # type: ignore[index]
            assert got[1][some][:number].tolist() == wanted[1][some][:number].tolist()  # type: ignore[index]


@pytest.mark.parametrize(("begin", "end"), PARTS)
def test_attention_by_blocks_is_that_by_the_dense_mask(begin: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its definition: compiling it takes long, and on a CPU it has no backward pass."""
    monkeypatch.setattr(attention, "_compiled", lambda function: function)
    index, starts = queries(ROWS[1:], begin, end)
    q, k, v = (x.detach() for x in inputs(end - begin, end, 4, 2, torch.float32))
    blocks, dense = block_mask(index, starts, end), dense_mask(index, starts, end)
    assert torch.allclose(InnerAttention()(q, k, v, blocks), masked_attention(q, k, v, dense), atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("begin", "end"), PARTS)
def test_on_cuda_a_document_mask_is_one_of_blocks(begin: int, end: int, compiled: bool) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    index, starts = (x.cuda() for x in queries(ROWS[1:], begin, end))
    torch.manual_seed(0)
    shapes = [(2, end - begin, 4, 64), (2, end, 2, 64), (2, end, 2, 64)]
    values = [torch.randn(shape, device="cuda") for shape in shapes]
    results = []
    for make in (block_mask, dense_mask):
        qkv = [x.clone().requires_grad_() for x in values]
        inner = InnerAttention()
        attend = torch.compile(inner, fullgraph=True) if compiled and make is block_mask else inner
        out = attend(*(2 * x for x in qkv), make(index, starts, end))
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in qkv)])
    for got, wanted in zip(*results, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 2e-3  # products in TF32, where that is allowed
    whole = torch.arange(end, device="cuda")[None]
    assert isinstance(DocumentMask()(whole), BlockMask)


def test_a_single_document_is_causal() -> None:
    q, k, v = inputs(9, 9, 4, 2)
    inner = InnerAttention()
    positions = torch.arange(9).expand(2, 9)
    assert torch.allclose(inner(q, k, v, DocumentMask()(positions)), inner(q, k, v, CausalMask()(positions)))


@pytest.mark.parametrize("name", ["", "_backward"])
def test_private_kernels_of_torch_take_what_is_passed(name: str) -> None:
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default
    names = [argument.name for argument in operator._schema.arguments]
    forward = ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]
    backward = ["grad_out", "query", "key", "value", "out", "logsumexp", *forward[3:]]
    assert names == (backward if name else forward)
    assert len(operator._schema.returns) == (3 if name else 2)
