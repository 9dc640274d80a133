"""Work in pieces that several processes share through a folder: any number of them, killed at any moment.

What a piece is, and what is made of all of them, does not belong here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from torchtitan.errors import ConfigError


def make_together(
    folder: Path,
    count: int,
    *,
    make: Callable[[int, Path], None],
    assemble: Callable[[list[Path]], None],
    finished: Callable[[], bool],
    start: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Return when ``finished()``, having made together with all who call this the ``count`` pieces and their whole.

    ``make(k, path)`` writes piece k; whoever finds all of them there calls ``assemble(paths)``, after which
    ``finished()`` must hold. Every process begins at its own ``start`` and goes round; a piece that another one holds
    is waited for at the end only. A process that dies lets go of its lock, and another one makes its piece.
    Errors of ``make`` and ``assemble`` are passed on; ``progress(done)`` hears of pieces made by anybody.
    """
    pieces = [folder / f"piece-{k:06d}" for k in range(count)]

    def settle(k: int, *, wait: bool) -> None:
        if pieces[k].exists():
            return
        with _lock(pieces[k].with_suffix(".lock"), wait=wait) as held:
            # In this order: the pieces vanish after the whole is there, so a piece that was seen missing
            # before the whole was seen missing has not been made.
            if not held or pieces[k].exists() or finished():
                return
            unfinished = pieces[k].with_suffix(".part")
            make(k, unfinished)
            unfinished.rename(pieces[k])
        progress(pieces_done(folder))

    while not finished():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for wait in (False, True):
                for k in range(count):
                    settle((start + k) % count, wait=wait)
            with _lock(folder / "assemble.lock", wait=True):
                if not finished():
                    assemble(pieces)
        except FileNotFoundError:
            # Another process finished and removed the folder under our feet; else it is an error.
            if not finished():
                raise
    progress(count)
    shutil.rmtree(folder, ignore_errors=True)


def pieces_done(folder: Path) -> int:
    """How many pieces are in the ``folder`` of ``make_together``; FileNotFoundError once all were put together."""
    return sum(name.startswith("piece-") and "." not in name for name in os.listdir(folder))


@contextlib.contextmanager
def _lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock file at ``path`` inside the block; yields False where another process has it and we do not wait."""
    held = take_lock(path, wait=wait)
    if held is None:
        yield False
        return
    with held:
        yield True


def take_lock(path: Path, *, wait: bool) -> IO[str] | None:
    """The lock file at ``path``, ours until it is closed or this process dies; None where another one has it and we do
    not wait. A process that is forked meanwhile has to close it as well."""
    file = open(path, "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        raise ConfigError(
            "data.cache_folder",
            f"the file system of {path.parent} cannot lock files ({error.strerror}); choose another",
        ) from None
    return file
