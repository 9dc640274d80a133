"""Context parallelism against one process: attention, a whole model, documents, and what cannot be split.

Every rank also computes the whole row by itself, so that a case costs no launch of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.context_memory import usage
from tests.launch import run_ranks
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.context import ContextSplit, apply_context_parallel, apply_mask
from torchtitan.distributed.spread import MaskKind, check_context
from torchtitan.distributed.topology import Axis, Degrees
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError
from torchtitan.models.llama3 import Llama3, Llama3Args
from torchtitan.models.spec import MODELS, Layout

LAYOUT: Layout = MODELS.get("llama3").layout
ARGS = Llama3Args(dim=32, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=101, multiple_of=16)
TOLERANCE = 1e-5
MASKS: tuple[MaskKind, ...] = ("causal", "documents")

# Lengths of the documents of each row, over 48 tokens: inside chunks of 6 and 12, across them, along their edges.
DOCUMENTS = [[5, 19, 1, 23], [48], [12, 12, 24], [1, 2, 3, 30, 12], [47, 1]]


def splits(world: World) -> dict[str, ContextSplit]:
    assert dist.group.WORLD is not None
    axis = Axis(dist.group.WORLD, world.rank, world.size)
    return {
        "head-tail": ContextSplit(axis, "gather", True),
        "contiguous": ContextSplit(axis, "gather", False),
        "ulysses": ContextSplit(axis, "ulysses", True),
    }


def positions_of(rows: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def batch(rows: list[list[int]] = DOCUMENTS) -> Batch:
    """A batch with ignored labels in uneven numbers."""
    positions = positions_of(rows)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(101, positions.shape, generator=generator) for _ in range(2))
    labels[tokens % 5 == 0] = IGNORE_INDEX
    labels[:, :7] = IGNORE_INDEX
    return Batch(tokens, labels, positions)


def wide_model(args: Llama3Args = ARGS) -> Llama3:
    """Weights with which attention is far from uniform and every token's logits far from the others'."""
    torch.manual_seed(0)
    model = Llama3(args)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def attention_differences(split: ContextSplit, mask: MaskKind, seq: int, dtype: torch.dtype) -> dict[str, float]:
    """Of this rank's output and gradients of q, k, v, each from what one process gives for its tokens."""
    torch.manual_seed(2)
    shapes = [(2, seq, 8, 8), (2, seq, 4, 8), (2, seq, 4, 8), (2, seq, 8, 8)]
    *whole, weight = (1.5 * torch.randn(shape) for shape in shapes)
    whole = [x.to(dtype).requires_grad_() for x in whole]
    positions = torch.arange(seq).expand(2, seq)
    if mask == "documents":
        positions = positions_of([[seq // 3, 1, seq - 1 - seq // 3], [seq - 2, 2]])
    index = split.index(seq // split.axis.size, torch.device("cpu"))

    def run(qkv: list[Tensor], positions: Tensor, weight: Tensor, model: Llama3) -> list[Tensor]:
        attention = model.layers["0"].get_submodule(LAYOUT.attention)
        out = attention(*qkv, model.mask(positions))
        (out * weight.to(dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in qkv)]

    model = Llama3(ARGS)
    apply_mask(model, LAYOUT, mask)
    expected = run(whole, positions, weight, model)
    apply_context_parallel(model, LAYOUT, split, mask)
    own = [x.detach()[:, index].requires_grad_() for x in whole]
    got = run(own, positions[:, index], weight[:, index], model)
    names = ("out", "dq", "dk", "dv")
    # The first query meets one key, so its gradient is zero: the scale is that of the whole row.
    return {
        name: float((g - e[:, index]).double().norm() / e.double().norm())
        for name, g, e in zip(names, got, expected, strict=True)
    }


def model_differences(
    split: ContextSplit, mask: MaskKind, spoil: Callable[[Batch], Batch] = lambda part: part
) -> dict[str, float]:
    """Of loss and parameter gradients, summed over ranks, and of this rank's logits."""
    whole = batch()
    num_valid = whole.num_valid()

    def run(model: Llama3, rows: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logits = model(rows.tokens, rows.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), reduction="sum") / num_valid
        loss.backward()
        return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    reference = wide_model()
    apply_mask(reference, LAYOUT, mask)
    logits, loss, gradients = run(reference, whole)
    model = wide_model()
    apply_context_parallel(model, LAYOUT, split, mask)
    own_logits, own_loss, own_gradients = run(model, spoil(split.take(whole)))
    for tensor in (own_loss, *own_gradients.values()):
        dist.all_reduce(tensor)
    assert list(own_gradients) == list(gradients), "parameters have other names"
    index = split.index(own_logits.shape[1], torch.device("cpu"))
    return {
        "logits": relative(own_logits, logits[:, index]),
        "loss": abs(float(own_loss - loss)),
        "gradient": max(relative(own_gradients[name], gradients[name]) for name in gradients),
    }


def all_differences(world: World) -> dict[str, dict[str, float]]:
    found = {}
    for name, split in splits(world).items():
        for mask in MASKS:
            # Chunks of one token, of odd numbers of them, and of many.
            for chunk in (1, 3, 64):
                seq = chunk * len(split.chunks) * world.size
                found[f"{name}, {mask}, {seq}"] = attention_differences(split, mask, seq, torch.float32)
            found[f"{name}, {mask}, model"] = model_differences(split, mask)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_gives_the_numbers_of_one_process(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(all_differences, ranks)):
        assert len(found) == 24
        for case, differences in found.items():
            if rank == 0:
                print(f"{ranks} ranks, {case:28s} " + "  ".join(f"{k} {v:.1e}" for k, v in differences.items()))
            assert max(differences.values()) <= TOLERANCE, f"rank {rank}: {case}: {differences}"


def spoiled_differences(world: World) -> dict[str, float]:
    """The same comparison with a fault in it, for each fault the largest difference."""
    found = {}

    def shifted(part: Batch) -> Batch:
        return dataclasses.replace(part, positions=part.positions + (world.rank == 1))

    def from_zero(part: Batch) -> Batch:
        return dataclasses.replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))

    for name, split in splits(world).items():
        for mask in MASKS:
            found[f"shifted, {name}, {mask}"] = model_differences(split, mask, shifted)["gradient"]
        found[f"from zero, {name}"] = model_differences(split, "causal", from_zero)["gradient"]

    reduce = ContextSplit.scatter_sum
    try:
        ContextSplit.scatter_sum = lambda split, *rows: [split._part(row) for row in rows]  # type: ignore[method-assign]
        for name in ("head-tail", "contiguous"):
            found[f"not reduced, {name}"] = model_differences(splits(world)[name], "causal")["gradient"]
            differences = attention_differences(splits(world)[name], "causal", 48, torch.float32)
            # The last of contiguous shares meets no queries but its own.
            found[f"not reduced, {name}, dk"] = world.max([differences["dk"]])[0]
            found[f"not reduced, {name}, dv"] = world.max([differences["dv"]])[0]
    finally:
        ContextSplit.scatter_sum = reduce  # type: ignore[method-assign]
    return found


def test_the_comparison_sees_wrong_positions_and_missing_gradients() -> None:
    for case, difference in run_ranks(spoiled_differences, 2)[0].items():
        assert difference > 100 * TOLERANCE, case


def bf16_differences(world: World) -> dict[str, dict[str, float]]:
    return {
        f"{name}, {mask}": attention_differences(split, mask, 192, torch.bfloat16)
        for name, split in splits(world).items()
        for mask in MASKS
    }


def test_bfloat16_stays_within_its_rounding() -> None:
    """A key's gradient is rounded on every rank before the sum, a causal output in two parts: one eps of bfloat16."""
    for found in run_ranks(bf16_differences, 4):
        for case, differences in found.items():
            assert max(differences.values()) <= torch.finfo(torch.bfloat16).eps, f"{case}: {differences}"


def compiled_differences(world: World, cases: list[tuple[str, MaskKind]]) -> list[float]:
    """Of parameter gradients between a block as it is and one compiled without a break."""
    found = []
    for name, mask in cases:
        split, gradients = splits(world)[name], []
        for compiled in (False, True):
            model = wide_model(dataclasses.replace(ARGS, n_layers=1))
            apply_context_parallel(model, LAYOUT, split, mask)
            if compiled:
                block = model.layers["0"]
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
            part = split.take(batch())
            model(part.tokens, part.positions).square().sum().backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        found.append(max(relative(a, b) for a, b in zip(*gradients, strict=True)))
    return found


def test_compiled_blocks_give_the_same() -> None:
    cases = [("head-tail", "documents"), ("ulysses", "causal")]
    for found in run_ranks(compiled_differences, 2, cases):
        assert max(found) <= TOLERANCE, found


@torch.no_grad()
def document_isolation(world: World) -> dict[str, Any]:
    """What a change of the second document of a row moves, and what that document gives alone."""
    whole = batch([[5, 19, 1, 23]])
    document = torch.zeros(48, dtype=torch.bool)
    document[5:24] = True
    changed = dataclasses.replace(whole, tokens=torch.where(document, (whole.tokens + 1) % 101, whole.tokens))
    reference = wide_model()
    alone = reference(whole.tokens[:, 5:24], torch.arange(19).unsqueeze(0))[0]
    found: dict[str, Any] = {}
    for name, split in splits(world).items():
        model = wide_model()
        apply_context_parallel(model, LAYOUT, split, "documents")
        calls = 0

        def counted(*parts: Tensor, gather: Any = split.gather) -> list[Tensor]:
            nonlocal calls
            calls += 1
            return gather(*parts)

        object.__setattr__(split, "gather", counted)
        before, after = (model(part.tokens, part.positions)[0] for part in map(split.take, (whole, changed)))
        index = split.index(before.shape[0], torch.device("cpu"))
        inside = document[index]
        found[name] = {
            "others moved": not torch.equal(before[~inside], after[~inside]),
            "itself moved": bool((before[inside] != after[inside]).any(-1).all()),
            "against alone": float((before[inside] - alone[index[inside] - 5]).abs().max()) if inside.any() else 0.0,
            "gathers": calls / 2,
        }
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_documents_know_nothing_of_each_other(ranks: int) -> None:
    for found in run_ranks(document_isolation, ranks):
        for name, seen in found.items():
            assert not seen["others moved"], name
            assert seen["itself moved"], name
            assert seen["against alone"] < 1e-4, name
            # One a layer for keys and values together, or one for the positions of whole rows.
            assert seen["gathers"] == (1 if name == "ulysses" else ARGS.n_layers), name


def one_rank(rank: int, size: int, method: Any, head_tail: bool) -> ContextSplit:
    return ContextSplit(Axis(None, rank, size), method, head_tail)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "head_tail", "held"),
    [
        ("gather", True, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
        ("gather", False, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        ("ulysses", True, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
    ],
)
def test_positions_and_labels_travel_with_their_tokens(method: str, head_tail: bool, held: list[list[int]]) -> None:
    tokens = torch.arange(24).view(2, 12)
    whole = Batch(tokens, tokens + 100, tokens + 200)
    for rank, expected in enumerate(held):
        split = one_rank(rank, 2, method, head_tail)
        part = split.take(whole)
        assert part.tokens.tolist() == [expected, [x + 12 for x in expected]]
        assert torch.equal(part.labels, part.tokens + 100) and torch.equal(part.positions, part.tokens + 200)
        assert split.index(6, tokens.device).tolist() == expected


def test_unequal_parts_are_refused_before_they_reach_a_collective() -> None:
    rows = torch.zeros(1, 18, dtype=torch.int64)
    with pytest.raises(ValueError, match="18 tokens do not split into 4 chunks"):
        one_rank(0, 2, "gather", True).take(Batch(rows, rows, rows))


@pytest.mark.parametrize(
    ("degrees", "method", "head_tail", "seq_len", "heads", "kv_heads"),
    [
        (Degrees(), "ulysses", False, 33, 3, 1),
        (Degrees(context=2), "gather", True, 36, 3, 1),
        (Degrees(context=2), "gather", False, 34, 3, 1),
        (Degrees(context=2, tensor=2), "gather", True, 36, 4, 2),
        (Degrees(context=2, tensor=3), "gather", True, 36, 6, 3),
        (Degrees(context=4), "ulysses", True, 36, 8, 4),
        (Degrees(context=2, tensor=2), "ulysses", True, 36, 8, 4),
    ],
)
def test_what_splits_evenly_passes(
    degrees: Degrees, method: Any, head_tail: bool, seq_len: int, heads: int, kv_heads: int
) -> None:
    check_context(degrees, method=method, head_tail=head_tail, seq_len=seq_len, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("degrees", "method", "head_tail", "seq_len", "heads", "key", "said"),
    [
        (Degrees(context=2), "gather", True, 34, (8, 8), "training.seq_len", "34 .*try 32 or 36, multiples of 4"),
        (Degrees(context=2), "gather", False, 33, (8, 8), "training.seq_len", "33 .*try 32 or 34, multiples of 2"),
        (
            Degrees(context=4),
            "gather",
            True,
            4,
            (8, 8),
            "training.seq_len",
            "chunk for each rank; try 8, multiples of 8",
        ),
        (Degrees(context=2, tensor=4), "gather", True, 36, (8, 8), "training.seq_len", "=2 and .*=4.*try 32 or 40"),
        (Degrees(context=2, tensor=3), "gather", True, 30, (6, 6), "training.seq_len", "try 24 or 36"),
        (Degrees(context=2), "ulysses", True, 33, (8, 8), "training.seq_len", "try 32 or 34"),
        (Degrees(context=4), "ulysses", True, 32, (8, 2), "context", "4 does not divide the 8 query and 2 .*try 1, 2,"),
        (Degrees(context=4), "ulysses", True, 32, (6, 6), "context", "try 1, 2, 3, 6, or .*method=gather"),
        (Degrees(context=4, tensor=2), "ulysses", True, 32, (8, 4), "context", "4 query and 2 .*degree=2.*try 1, 2,"),
    ],
)
def test_what_does_not_is_named_with_what_would(
    degrees: Degrees, method: Any, head_tail: bool, seq_len: int, heads: tuple[int, int], key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_context(degrees, method=method, head_tail=head_tail, seq_len=seq_len, heads=heads[0], kv_heads=heads[1])
    assert refused.value.key == (key if "." in key else f"parallelism.{key}_parallel_degree")


def test_what_a_block_keeps_falls_as_the_degree_rises() -> None:
    """All but the gathered keys and values; the whole measurement is scripts/prove_context_memory.py."""
    alone = run_ranks(usage, 1, 512, torch.float32)[0]["one process"]
    for found in run_ranks(usage, 2, 512, torch.float32):
        for method in ("gather, head-tail", "gather, contiguous"):
            assert found[method].inputs * 2 == alone.inputs
            assert found[method].attention <= 1.02 * alone.attention / 2
            assert found[method].block <= 1.02 * alone.block / 2
            assert found[method].gathered == 2 * 512 * 4 * 64 * 4
        assert found["ulysses"].block <= 1.1 * alone.block / 2
