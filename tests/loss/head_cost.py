"""What head and loss cost, in chunks and at once: seconds of the processor and peak memory, forward and backward.

As a program, in a process of its own, it prints the bytes that one pass adds at its peak:
python -m tests.loss.head_cost TOKENS DIM IDS CHUNKS
"""

import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.loss.chunks import loss_of_linear
from torchtitan.loss.losses import cross_entropy


@dataclass(frozen=True)
class Size:
    tokens: int
    dim: int
    ids: int


def inputs(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, one of six of which is missing."""
    torch.manual_seed(0)
    hidden = torch.randn(1, size.tokens, size.dim, requires_grad=True)
    weight = (torch.randn(size.ids, size.dim) * size.dim**-0.5).requires_grad_()
    labels = torch.randint(size.ids, (1, size.tokens))
    labels[:, ::6] = IGNORE_INDEX
    return hidden, weight, labels


def run(hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
    """One pass, forward and backward, by as many ``chunks``; 1 is the plain loss of all logits."""
    hidden.grad = weight.grad = None
    if chunks == 1:
        loss = cross_entropy()(F.linear(hidden, weight), labels)
    else:
        loss = loss_of_linear(hidden, weight, None, labels, loss=cross_entropy(), chunks=chunks)
    loss = loss / labels.numel()
    loss.backward()
    return loss.detach()


def seconds(size: Size, chunks: int, repeats: int) -> tuple[float, float]:
    """Of the plain loss and of that in chunks: medians of ``repeats`` passes of the processor's time, in turn."""
    data = inputs(size)
    times: dict[int, list[float]] = {1: [], chunks: []}
    for _ in range(repeats):
        for each, taken in times.items():
            start = time.process_time()
            run(*data, each)
            taken.append(time.process_time() - start)
    return statistics.median(times[1]), statistics.median(times[chunks])


def added_bytes(size: Size, chunks: int) -> int:
    """What one pass in a new process adds to its memory at its peak."""
    words = [str(number) for number in (size.tokens, size.dim, size.ids, chunks)]
    found = subprocess.run(
        [sys.executable, "-m", "tests.loss.head_cost", *words], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    *of_size, number = map(int, sys.argv[1:])
    run(*inputs(Size(64, of_size[1], 64)), number)  # what torch sets up once is not the loss's
    given = inputs(Size(*of_size))
    before = _peak()
    run(*given, number)
    print(_peak() - before)
