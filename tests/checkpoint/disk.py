"""A disk that fails, or takes the whole process with it, at the n-th thing that is done to its files.

Names are made, changed and removed under the eyes of an audit hook, which sees whatever does it; what is written goes
through files that are wrapped when they are opened.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from upath import UPath

NAMES = ("mkdir", "rename", "remove", "rmdir")
CONTENT = ("open", "write", "flush", "fsync", "close")
_EVENTS = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1}
"""Which of its arguments is the descriptor of the folder that a path is relative to."""


class Killed(BaseException):
    """The process ends here, as far as its disk can tell."""


def nothing(number: int, kind: str) -> None:
    """All goes well."""


Fault = Callable[[int, str], BaseException | None]
"""What is raised at the operation of this number and kind."""


class Disk:
    """Operations on what lies below ``root``, as ``kind path``, each before it is done, and ``fault`` instead of it."""

    def __init__(self, root: Path, fault: Fault = nothing) -> None:
        self.root = str(root)
        self.fault = fault
        self.operations: list[str] = []
        self.failed: list[str] = []

    def on(self, kind: str, path: str) -> None:
        if path.startswith(self.root):
            self.operations.append(f"{kind} {path[len(self.root) + 1 :]}")
            if (error := self.fault(len(self.operations), kind)) is not None:
                self.failed.append(self.operations[-1])
                raise error


def full(first: int, last: float) -> Fault:
    """No room from the operation ``first`` to ``last`` for whatever wants some."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return lambda n, kind: error if first <= n <= last and kind in ("mkdir", *CONTENT) else None


def read_only(first: int, last: float) -> Fault:
    """Nothing may be changed from the operation ``first`` to ``last``."""
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    return lambda n, kind: error if first <= n <= last else None


def dead(first: int) -> Fault:
    """From the operation ``first`` on nothing is done any more, in no thread."""
    return lambda n, kind: Killed() if n >= first else None


def killed(first: int) -> Fault:
    """A true SIGKILL."""

    def fault(n: int, kind: str) -> None:
        if n == first:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


@dataclass(frozen=True)
class Some:
    """Which operations are tried: those of some ``kinds``, and of the writes to a file every one in ``writes``."""

    kinds: Sequence[str] = (*NAMES, *CONTENT)
    writes: int = 1

    def of(self, operations: Sequence[str]) -> list[int]:
        """Their numbers."""
        numbers, row = [], 0
        for number, operation in enumerate(operations, 1):
            kind = operation.partition(" ")[0]
            row = row + 1 if kind == "write" else 0
            if kind in self.kinds and (not row or (row - 1) % self.writes == 0):
                numbers.append(number)
        return numbers


ALL = Some()
_watching: list[Disk] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            _watching[0].on("open", os.path.abspath(os.fsdecode(arguments[0])))
    elif event in _EVENTS:
        path, folder = arguments[0], arguments[_EVENTS[event]]
        if isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        _watching[0].on(event.partition(".")[2], os.path.abspath(os.fsdecode(path)))


class _File:
    def __init__(self, file: Any, disk: Disk, path: str) -> None:
        self._file, self._disk, self._path = file, disk, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, block: Any) -> Any:
        try:
            self._disk.on("write", self._path)
        except BaseException:
            self._file.write(block[: len(block) // 2])  # as a disk does that is full in the middle
            raise
        return self._file.write(block)

    def flush(self) -> None:
        self._disk.on("flush", self._path)
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._disk.on("close", self._path)
            finally:
                self._file.close()

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextmanager
def watched(disk: Disk) -> Iterator[Disk]:
    """Within, ``disk`` sees what this process does, and nothing waits for a true one: it need not outlast a machine.

    The hook stays, idle, as Python's audit hooks do.
    """
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    local = type(UPath(disk.root))
    open_as_usual = local.open

    def open_watched(self: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = open_as_usual(self, mode, *arguments, **options)
        return _File(file, disk, str(self)) if "w" in mode and str(self).startswith(disk.root) else file

    def fsync_watched(descriptor: int) -> None:
        disk.on("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

    _watching.append(disk)
    try:
        with mock.patch.object(local, "open", open_watched), mock.patch.object(os, "fsync", fsync_watched):
            yield disk
    finally:
        _watching.remove(disk)


_hooked: list[bool] = []
