"""Writing beside training: a thread of low priority, a copy of what it writes, and a process that can do it instead.

What is written, and when, is in ``checkpointer.py``.
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from upath import UPath

from torchtitan.checkpoint.dcp.writer import Resolve, Written, write_share
from torchtitan.errors import one_line

T = TypeVar("T")
LOWER_PRIORITY = 10
"""Added to the niceness of what writes: where all cores are busy, it gets a tenth of one."""


@dataclass(frozen=True)
class Failure:
    """What went wrong; ``storage``: because of a disk, a permission or a network, so that it may go right next time."""

    message: str
    storage: bool


def attempt(action: Callable[[], T]) -> "T | Failure":
    """What ``action`` returns, or why it failed."""
    try:
        return action()
    except OSError as error:
        return Failure(one_line(error), storage=True)
    except BaseException as error:
        return Failure(f"{type(error).__name__}: {one_line(error)}", storage=False)


class Task(Generic[T]):
    """``action`` on a thread of its own, which ends with the process."""

    def __init__(self, action: Callable[[], T], *, low_priority: bool = True) -> None:
        self._action = action
        self._low_priority = low_priority
        self._outcome: list[T | Failure] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._low_priority and sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + LOWER_PRIORITY)
        self._outcome.append(attempt(self._action))

    def done(self) -> bool:
        return bool(self._outcome)

    def wait(self, seconds: float | None = None) -> None:
        """Return once it is done, or after so many seconds."""
        self._thread.join(seconds)

    def outcome(self) -> T | Failure:
        """What it returned or why it failed, once it is done."""
        return self._outcome[0]


class Writer(Protocol):
    """How a rank's share of a step gets into its files."""

    def reserve(self, plan: SavePlan) -> None:
        """Get beforehand what a save of that plan will need."""

    def prepare(self, plan: SavePlan, resolve: Resolve) -> None:
        """After this the tensors may change, if the writer says so."""

    def write(self, folder: UPath) -> Written:
        """Write what was prepared; called on another thread."""

    def close(self) -> None: ...


class DirectWriter:
    """From the tensors themselves, which must not change meanwhile."""

    def reserve(self, plan: SavePlan) -> None:
        """Nothing is needed."""

    def prepare(self, plan: SavePlan, resolve: Resolve) -> None:
        self._plan, self._resolve = plan, resolve

    def write(self, folder: UPath) -> Written:
        return write_share(folder, self._plan, self._resolve)

    def close(self) -> None:
        """Nothing is kept."""


class CopyingWriter:
    """From a copy in the memory of this process, which is kept for the next save."""

    def __init__(self) -> None:
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._plan: SavePlan | None = None
        self._touching: Task[None] | None = None

    def reserve(self, plan: SavePlan) -> None:
        if plan is not self._plan:
            self._plan, self._copies = plan, self._allocate(plan)
            # The system gives memory only when it is written to, which would take as long as the copy itself.
            self._touching = Task(self._touch)

    def _touch(self) -> None:
        for copy in self._copies.values():
            copy.zero_()

    def prepare(self, plan: SavePlan, resolve: Resolve) -> None:
        self.reserve(plan)
        if self._touching is not None:
            self._touching.wait()
            self._touching = None
        for item in plan.items:
            self._copies[item.index].copy_(resolve(item), non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _allocate(self, plan: SavePlan) -> dict[MetadataIndex, Tensor]:
        pinned = torch.cuda.is_available()
        return {item.index: torch.empty(_shape(item), dtype=_dtype(item), pin_memory=pinned) for item in plan.items}

    def write(self, folder: UPath) -> Written:
        assert self._plan is not None
        return write_share(folder, self._plan, lambda item: self._copies[item.index])

    def close(self) -> None:
        self._copies = {}


class ProcessWriter(CopyingWriter):
    """From a copy in memory that is shared with a process of its own, which writes and takes nothing from training but
    the time of a core."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        # Not by -m, which would look into the current folder first.
        start = "import sys; sys.path[:] = sys.argv[2:]; from torchtitan.checkpoint.writer_process import main; main()"
        command = [sys.executable, "-c", start, str(theirs.fileno()), *sys.path]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._memory: int | None = None

    def _allocate(self, plan: SavePlan) -> dict[MetadataIndex, Tensor]:
        layout = Layout.of(plan)
        # Not in /dev/shm, which containers keep small.
        self._memory = os.memfd_create("checkpoint")
        os.ftruncate(self._memory, layout.size)
        copies = layout.tensors(self._memory)
        if torch.cuda.is_available():
            for tensor in copies.values():
                register = torch.cuda.cudart().cudaHostRegister  # what pin_memory does, for memory of others
                torch.cuda.check_error(register(tensor.data_ptr(), tensor.nbytes, 0))
        return copies

    def write(self, folder: UPath) -> Written:
        assert self._plan is not None
        try:
            self._connection.send((self._memory is not None, self._plan, str(folder)))
            if self._memory is not None:
                send_handle(self._connection, self._memory, self._process.pid)
                os.close(self._memory)
                self._memory = None
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            raise RuntimeError(f"the process that writes checkpoints was {how}") from None
        if isinstance(answer, Failure):
            raise (OSError if answer.storage else RuntimeError)(answer.message)
        return answer

    def close(self) -> None:
        super().close()
        self._connection.close()
        self._process.kill()  # it has nothing left to write, and may take its time
        self._process.wait()


@dataclass(frozen=True)
class Layout:
    """Where in one piece of memory of ``size`` bytes the tensors of a plan lie."""

    items: Sequence[WriteItem]
    offsets: Sequence[int]
    size: int

    @staticmethod
    def of(plan: SavePlan) -> "Layout":
        offsets, end = [], 0
        for item in plan.items:
            offsets.append(end)
            end += -(-_shape(item).numel() * _dtype(item).itemsize // 64) * 64
        return Layout(plan.items, offsets, max(end, 64))

    def tensors(self, memory: int) -> dict[MetadataIndex, Tensor]:
        """The tensors, in the memory that the file descriptor stands for."""
        buffer = mmap.mmap(memory, self.size)

        def tensor(shape: torch.Size, dtype: torch.dtype, offset: int) -> Tensor:
            if not shape.numel():  # of a rank that has nothing of it; torch takes no such buffer
                return torch.empty(shape, dtype=dtype)
            # Each with a storage of its own: of a view, all that lies around it would be written as well.
            return torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=offset).view(shape)

        return {
            item.index: tensor(_shape(item), _dtype(item), offset)
            for item, offset in zip(self.items, self.offsets, strict=True)
        }


def _shape(item: WriteItem) -> torch.Size:
    assert item.tensor_data is not None, "only tensors are saved"
    return item.tensor_data.chunk.sizes


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, "only tensors are saved"
    return item.tensor_data.properties.dtype


BESIDE_TRAINING: dict[str, Callable[[], Writer]] = {"async": CopyingWriter, "async_with_pinned_mem": ProcessWriter}
"""By ``checkpoint.async_mode``: those that let training go on while they write."""
