"""The loss in chunks against the plain one. In all layouts they are compared in tests/equivalence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loss import head_cost
from tests.loss.test_cross_entropy import CASES, build
from torchtitan.config import load_config
from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.distributed.head import HeadLoss, leave_out_head
from torchtitan.errors import ConfigError
from torchtitan.loss.chunks import loss_of_linear
from torchtitan.loss.losses import Loss
from torchtitan.models.spec import MODELS
from torchtitan.resolve.job import resolve_job
from torchtitan.transforms import CONVERTERS

IDS, DIM = 11, 6
TOKENS = 3 * 7


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and labels of which the first nine are missing: whole chunks, if they are small."""
    torch.manual_seed(0)
    labels = torch.randint(IDS, (3, 7))
    labels.view(-1)[:9] = IGNORE_INDEX
    tensors = (torch.randn(3, 7, DIM), torch.randn(IDS, DIM), torch.randn(IDS))
    hidden, weight, bias = (tensor.to(dtype) for tensor in tensors)
    return hidden, weight, bias, labels


def gradients(of: Callable[[Tensor, Tensor, Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The value of ``of``, and the gradients of three times that."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    value = of(*leaves)
    return (value.detach(), *torch.autograd.grad(3 * value, leaves))


def plain(loss: Loss, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return loss(F.linear(hidden, weight, bias), labels)


@pytest.mark.parametrize("chunks", [1, 2, 4, TOKENS, 1000])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_loss(name: str, chunks: int) -> None:
    *tensors, labels = data()
    loss = build(name)
    expected = gradients(lambda x, w, b: plain(loss, x, w, b, labels), *tensors)
    got = gradients(lambda x, w, b: loss_of_linear(x, w, b, labels, loss=loss, chunks=chunks), *tensors)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            loss_of_linear(*tensors, labels, loss=loss, chunks=chunks), expected[0], rtol=1e-6, atol=1e-6
        )


def test_the_gradient_of_bfloat16_weights_is_summed_in_float32() -> None:
    """Each of 512 chunks adds a half: from 128 on bfloat16 would round that away."""
    hidden, weight = torch.ones(1, 512, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    labels = torch.zeros(1, 512, dtype=torch.int64)
    leaf = weight.requires_grad_()
    loss_of_linear(hidden, leaf, None, labels, loss=build("cross_entropy"), chunks=512).backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
    assert leaf.grad.flatten().tolist() == [-256.0, 256.0]


def test_a_frozen_weight_gets_no_gradient_and_the_backward_pass_can_be_run_twice() -> None:
    hidden, weight, _, labels = data()
    hidden.requires_grad_()
    value = loss_of_linear(hidden, weight, None, labels, loss=build("cross_entropy"), chunks=4)
    first, second = (torch.autograd.grad(value, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert weight.grad is None


@pytest.mark.parametrize("gradients", [True, False])
def test_no_logits_but_those_of_a_chunk_come_to_the_loss(gradients: bool) -> None:
    hidden, weight, bias, labels = data()
    seen = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append((tuple(logits.shape), tuple(labels.shape)))
        return logits.sum()

    with torch.set_grad_enabled(gradients):
        loss_of_linear(hidden.requires_grad_(), weight, bias, labels, loss=loss, chunks=4)
    assert seen == [((1, n, IDS), (1, n)) for n in (6, 5, 5, 5)]


def test_it_takes_a_quarter_of_the_memory_at_most_and_hardly_more_time() -> None:
    """In small; scripts/prove_speed.py measures a large vocabulary."""
    size = head_cost.Size(tokens=1024, dim=64, ids=16_384)
    assert head_cost.added_bytes(size, 16) <= head_cost.added_bytes(size, 1) / 4
    alone, in_chunks = head_cost.seconds(size, 16, repeats=5)
    assert in_chunks <= 1.4 * alone  # what a busy machine adds to either is no fault of the loss


def build_model() -> tuple[nn.Module, Any]:
    spec = MODELS.get("llama3")
    args = spec.args_cls(dim=16, n_layers=1, n_heads=2, vocab_size=IDS, norm_eps=1e-5, rope_theta=1e4, multiple_of=8)
    return spec.cls(args), spec.layout


def test_a_model_that_changes_what_its_head_returns_is_refused() -> None:
    model, layout = build_model()
    of_head = leave_out_head(model, layout, build("cross_entropy"), chunks=2, mesh=None)
    assert isinstance(of_head, HeadLoss)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    hidden = model(tokens, torch.arange(8).unsqueeze(0))
    assert hidden.shape == (1, 8, 16) and of_head(hidden, tokens).isfinite()
    with pytest.raises(RuntimeError, match=r"loss\.chunks must be 1"):
        of_head(hidden * 2, tokens)


class Other(nn.Linear):
    pass


def other_class(model: nn.Module) -> None:
    model.output.__class__ = Other  # type: ignore[assignment]


def other_forward(model: nn.Module) -> None:
    model.output.forward = lambda x: x  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("converter", "problem"), [(other_class, "is Other"), (other_forward, "has another forward than nn.Linear")]
)
def test_a_head_that_is_no_plain_linear_map_is_refused(
    converter: Callable[[nn.Module], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = CONVERTERS.bind
    monkeypatch.setattr(CONVERTERS, "bind", lambda name, *args, **kwargs: lambda: converter if name == "x" else known)
    config = load_config(["--loss.chunks=2"])
    config = config.model_copy(update={"model": config.model.model_copy(update={"converters": ["x"]})})
    with pytest.raises(ConfigError, match=rf"the head, output, {problem} after model\.converters"):
        resolve_job(config, 1)


def test_more_chunks_than_tokens_are_refused() -> None:
    argv = ["--training.seq_len=64", "--training.local_batch_size=2", "--loss.chunks"]
    assert resolve_job(load_config([*argv, "128"]), 1).config.loss.chunks == 128
    with pytest.raises(ConfigError, match="the loss is taken of 128 tokens of a rank at once"):
        resolve_job(load_config([*argv, "129"]), 1)
    with pytest.raises(ConfigError, match="the loss is taken of 64 tokens of a rank at once"):
        resolve_job(load_config([*argv, "65", "--parallelism.context_parallel_degree=2"]), 2)
