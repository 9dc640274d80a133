"""Times what no training step can do without, each alone: python scripts/bare_kernels.py OVERRIDES

Matrix products of the linear maps, attention, and the optimizer's update, at the shapes and in the types of the run
that the overrides describe. Prints JSON: seconds a step, the device's peak, and tokens/s of the loader alone.
benchmark.py divides steps by it. What is recomputed for less memory is no part of it.
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config import ConfigError, describe_error, load_config
from torchtitan.data.loader import build_loader
from torchtitan.feed import blended, open_rows
from torchtitan.log import logger
from torchtitan.models.attention import InnerAttention
from torchtitan.observe.device import peak_flops
from torchtitan.resilience.end import BAD_CONFIG
from torchtitan.resolve.job import Job, resolve_job

BUDGET_SECONDS = 1.0  # for each kernel, and at least five times
MOST_TIMES = 50


def shapes(job: Job) -> tuple[Counter[tuple[int, int, int]], Counter[tuple[Any, ...]]]:
    """How often a batch meets each linear map ``(tokens, inputs, outputs)``, and each attention ``(shape of queries,
    shape of keys)``, both ``[batch, seq, heads, head_dim]``."""
    linear: Counter[tuple[int, int, int]] = Counter()
    attention: Counter[tuple[Any, ...]] = Counter()
    model = job.spec.build_meta(job.args)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args: linear.update([(args[0].numel() // m.in_features, m.in_features, m.out_features)])
            )
        elif isinstance(module, InnerAttention):
            module.register_forward_pre_hook(lambda m, args: attention.update([(args[0].shape, args[1].shape)]))
    training = job.config.training
    tokens = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64, device="meta")
    with torch.no_grad():
        model(tokens, tokens)
    return linear, attention


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of one call of many."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / calls

    timed(1)
    # One after the other, so that an accelerator does not wait for the host in between.
    calls = 1 if device.type == "cpu" else 10
    times = [timed(calls) for _ in range(5)]
    deadline = time.perf_counter() + BUDGET_SECONDS - calls * sum(times)
    while time.perf_counter() < deadline and len(times) < MOST_TIMES:
        times.append(timed(calls))
    return statistics.median(times)


def products(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of the three products of a linear map: its output, and the gradients of its input and its weight."""
    x, dx = (torch.rand(tokens, inputs, dtype=dtype, device=device) for _ in range(2))
    w, dw = (torch.rand(outputs, inputs, dtype=dtype, device=device) for _ in range(2))
    y = torch.rand(tokens, outputs, dtype=dtype, device=device)
    return sum(
        seconds(call, device)
        for call in (
            lambda: torch.mm(x, w.t(), out=y),
            lambda: torch.mm(y, w, out=dx),
            lambda: torch.mm(y.t(), x, out=dw),
        )
    )


def attention_seconds(queries: torch.Size, keys: torch.Size, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of causal attention, forward and backward."""
    q, k, v = (
        torch.rand(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for shape in (queries, keys, keys)
    )
    gradient = torch.rand(queries, dtype=dtype, device=device).transpose(1, 2)

    def both() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries[2] != keys[2])
        torch.autograd.grad(out, (q, k, v), gradient)

    return seconds(both, device)


def optimizer_seconds(job: Job, device: torch.device) -> float:
    """Seconds of the run's optimizer on all parameters."""
    dtype = getattr(torch, job.config.training.dtype)
    parameters: list[tuple[str, Tensor]] = []
    for name, meta in job.spec.build_meta(job.args).named_parameters():
        parameter = nn.Parameter(torch.rand(meta.shape, dtype=dtype, device=device))
        parameter.grad = torch.rand_like(parameter)
        parameters.append((name, parameter))
    return seconds(job.optimizer.build(parameters).step, device)


def loader_tokens_per_second(job: Job) -> float:
    """What the loader gives within a second, or in a hundred batches."""
    training = job.config.training
    rows = blended(job, open_rows(job), [0 for _ in job.blend.stages])
    loader = build_loader(
        rows,
        global_batch_size=training.local_batch_size,
        ranks=1,
        rank=0,
        local_batch_size=training.local_batch_size,
        num_workers=training.dataloader.num_workers,
        prefetch_factor=training.dataloader.prefetch_factor,
    )
    batches = iter(loader)
    next(batches)
    count, start = 0, time.perf_counter()
    while count < 100 and time.perf_counter() - start < 1:
        next(batches)
        count += 1
    taken = time.perf_counter() - start
    loader.close()
    return count * training.local_batch_size * training.seq_len / taken


def main(argv: list[str]) -> int:
    logger.setLevel("ERROR")
    config = None
    try:
        config = load_config(argv)
        job = resolve_job(config, 1)
    except ConfigError as error:
        print(describe_error(error, config), file=sys.stderr)
        return BAD_CONFIG
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = config.training
    dtype = getattr(torch, training.mixed_precision_param)
    rows = training.global_batch_size
    batches = 1 if rows == -1 else -(-rows // training.local_batch_size)
    linear, attention = shapes(job)
    peak, _ = peak_flops(device, dtype)
    found = {
        "products_seconds": batches * sum(n * products(*shape, dtype, device) for shape, n in linear.items()),
        "attention_seconds": batches * sum(n * attention_seconds(*s, dtype, device) for s, n in attention.items()),
        "optimizer_seconds": optimizer_seconds(job, device),
        "loader_tokens_per_second": loader_tokens_per_second(job),
        "flops_per_token": job.spec.flops(job.args, training.seq_len).full,
        # Of a busy machine, the second look is a better one.
        "peak_flops": None if peak is None else max(peak, peak_flops(device, dtype)[0] or 0.0),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
