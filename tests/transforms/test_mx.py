"""MXFP8: the numbers of its products, which maps become such, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.runs import tiny_argv
from torchtitan.config import load_config
from torchtitan.errors import ConfigError
from torchtitan.resolve.job import resolve_job
from torchtitan.transforms.mx import NAME, Mx

ON = f"--model.converters={NAME}"


def rounded(matrix: torch.Tensor, up: bool) -> torch.Tensor:
    """``[rows, 32 n]`` as MXFP8 along its rows, by the definition (OCP Microscaling Formats 1.0, section 6.3)."""
    blocks = matrix.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (largest / 448).log2().ceil() if up else largest.log2().floor() - 8
    small = (blocks / exponent.exp2()).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (small * exponent.exp2()).flatten(-2)


@pytest.mark.parametrize(("recipe", "up"), [("mxfp8_cublas", False), ("mxfp8_cublas_rceil", True)])
def test_products_are_those_of_rounded_blocks(recipe: str, up: bool) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        maps = nn.Sequential(nn.Linear(64, 96), nn.Linear(64, 48))
    Mx(recipe, [], emulate=True)(maps)  # type: ignore[arg-type]
    assert type(maps[1]) is nn.Linear  # no multiple of 32
    linear = maps[0].to_empty(device="cpu")
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_()
    x = torch.randn(2, 32, 64, requires_grad=True)
    grad = torch.randn(2, 32, 96)
    out = linear(x)
    out.backward(grad)
    tokens, grads, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), linear.weight.detach()

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return rounded(a, up) @ rounded(b.T.contiguous(), up).T

    torch.testing.assert_close(out.flatten(0, 1), product(tokens, weight.T) + linear.bias)
    torch.testing.assert_close(x.grad.flatten(0, 1), product(grads, weight))  # type: ignore[union-attr]
    torch.testing.assert_close(linear.weight.grad, product(grads.T.contiguous(), tokens))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([ON], f"{NAME}.emulate: there is no GPU here to multiply in MXFP8"),
        (
            [ON, f"--{NAME}.emulate", "--training.seq_len=40"],
            "training.local_batch_size: a rank computes 240 tokens at once, and quantize.linear.mx takes",
        ),
        (
            [ON, f"--{NAME}.emulate", "--parallelism.tensor_parallel_degree=2"],
            "parallelism.tensor_parallel_degree: a rank's part of the 32 outputs of layers.0.attention.wq would be no",
        ),
        ([ON, f"--{NAME}.emulate", f"--{NAME}.filter_fqns=outptu"], f"{NAME}.filter_fqns: no linear map has 'outptu'"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        resolve_job(load_config(tiny_argv(tmp_path, *words)), 2 if "tensor" in words[-1] else 1)


def test_gpus_below_blackwell_are_refused_when_a_run_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigError, match=rf"{NAME}.emulate: this GPU \(SM90\) cannot .* takes SM100"):
        Mx("mxfp8_cublas", [], emulate=False)(nn.Sequential())


def test_a_model_without_a_head_of_that_name_needs_no_filter(tmp_path: Path) -> None:
    with torch.device("meta"):
        Mx("mxfp8_cublas", ["output"], emulate=True).check(nn.Sequential(nn.Linear(32, 32)))


def test_it_is_a_choice_of_the_configuration(tmp_path: Path) -> None:
    """TorchTitan's key for a kernel is taken, with a note."""
    kernel = f"--{NAME}.mxfp8_dim1_cast_kernel_choice=triton"
    for words in ([ON, f"--{NAME}.emulate", kernel], [kernel]):
        job = resolve_job(load_config(tiny_argv(tmp_path, *words)), 1)
        assert len(job.converters) == int(ON in words)
