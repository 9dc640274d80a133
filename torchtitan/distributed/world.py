"""This process's place among the others: process group, device, seeds, timeouts, reductions of host numbers.

Meshes and degrees are in ``topology.py``.
"""

import ctypes
import hashlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout  # no public call changes the timeout of a group

from torchtitan.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Rank and size of this process's group, and the device it computes on."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of host numbers over all ranks, element by element, exact for integers below 2**53."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Maximum of host numbers over all ranks, element by element."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        # On the host: a device would have to finish its queue before the numbers could be read.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """What each rank passed, in the order of ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first(self, value: T | None) -> T | None:
        """What the first rank passed that passed something; None if none did."""
        return next((passed for passed in self.gather(value) if passed is not None), None)

    def gather_to_first(self, value: Any) -> list[Any] | None:
        """On rank 0 what each rank passed, in the order of ranks; None on the others."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values)
        return values

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Of the ``values`` that rank 0 passes, one for each rank, this rank's."""
        mine = [None]
        dist.scatter_object_list(mine, None if values is None else list(values))
        return mine[0]

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        self.sum([0.0])

    def set_timeout(self, seconds: float, groups: Sequence[dist.ProcessGroup]) -> None:
        """Time that a collective of the whole world and of ``groups`` may take before it is an error."""
        for group in (None, *groups):
            _set_pg_timeout(timedelta(seconds=seconds), group)


def world_size() -> int:
    """Number of processes that the launcher started, told by its environment; 1 without one."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigError(None, f"{name}={text} in the environment is no number; launch with ./run_train.sh")
    return int(text)


@contextmanager
def init_world(*, init_timeout_seconds: float) -> Iterator[World]:
    """The process group of a torchrun-like environment, or of this process alone where there is none."""
    rank, size = _number("RANK", 0), world_size()
    local_rank, local_size = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size)
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                None,
                f"{local_size} processes on a machine with {torch.cuda.device_count()} GPUs; start one a GPU (NGPU)",
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    timeout = timedelta(seconds=init_timeout_seconds)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        _follow_parent()
        dist.init_process_group(backend, timeout=timeout)
    elif size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        raise ConfigError(
            None, "WORLD_SIZE is set without RANK, MASTER_ADDR or MASTER_PORT; launch with ./run_train.sh or torchrun"
        )
    world = World(rank, local_rank, size, local_size, device)
    yield world
    # Not after an error: the others may be waiting in a collective, and only this process's end tells them.
    world.barrier()
    dist.destroy_process_group()


def _follow_parent() -> None:
    """Be asked to stop when the launcher dies, so that no worker outlives it."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM, 0, 0, 0)


def set_determinism(seed: int, *, deterministic: bool, warn_only: bool) -> None:
    """Seed torch's generator, and on request allow only kernels that repeat to the bit.

    Initial weights, data order and training steps have seeds of their own and do not depend on this.
    """
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def seed_step(seed: int, step: int, reader: int, device: torch.device) -> None:
    """Seed torch's generators of the host and of ``device`` for one training step.

    What a step draws is then a function of these three numbers: a run that goes on draws what it would have drawn, and
    nothing of it is stored. Ranks that read the same rows draw alike.
    """
    digest = hashlib.sha256(f"step {step} of reader {reader} of seed {seed}".encode()).digest()
    mixed = int.from_bytes(digest[:8], "little")
    # Not torch.manual_seed: for each kind of device that is not in use it keeps a stack trace, 0.4 ms in all.
    torch.default_generator.manual_seed(mixed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(mixed)
