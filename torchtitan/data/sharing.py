"""Work in pieces that several processes share through a folder: any number of them, killed at any moment.

What a piece is, and what is made of all of them, does not belong here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from torchtitan.errors import ConfigError
from torchtitan.log import logger

_TRIES, _TRY_SECONDS = 100, 0.02


class UnreadableError(Exception):
    """The piece at ``path`` cannot be read, though it bears the name of one that is whole."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why


class OtherWorkError(Exception):
    """In a folder there is other work than what was to be done there, or who does it wants to be alone: in words."""


def join_work(folder: Path, facts: bytes, *, begun: Callable[[], bool], alone: bool = False) -> IO[bytes]:
    """Take part in the work of ``facts`` in ``folder``, until what is returned is closed or this process dies.

    All who take part at one time are of the same facts, or it is one who is ``alone``. Work of other facts that nobody
    is at is forgotten, unless something of it is done, as ``begun()`` tells: OtherWorkError.
    """
    recipe = folder / "recipe.json"
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = open(recipe, "ab+", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            continue  # somebody finished, and removed the folder
        with contextlib.ExitStack() as unless_taken:
            unless_taken.enter_context(file)
            if _locked(file, recipe, fcntl.LOCK_EX, wait=False):
                if _content(file) != facts:
                    if begun():
                        raise OtherWorkError("holds pieces of other data or of another tokenizer; remove it")
                    file.truncate(0)
                    file.write(facts)
                    os.fsync(file.fileno())
            elif alone:
                raise OtherWorkError("is being made by another process; wait until it is done")
            # Who holds it for a moment, as above, is waited for.
            if not alone and not _locked(file, recipe, fcntl.LOCK_SH, wait=False):
                time.sleep(_TRY_SECONDS)
                continue
            if os.fstat(file.fileno()).st_nlink == 0:
                continue
            if _content(file) != facts:
                break
            unless_taken.pop_all()
            return file
    raise OtherWorkError("is being made of other data, or by a process that is alone; wait until it is done")


def _content(file: IO[bytes]) -> bytes:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


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
    is waited for at the end only. A process that dies lets go of its lock, and another one makes its piece; one of
    which ``assemble`` says UnreadableError, as a loss of power may leave it, is made again, once.
    Errors of ``make`` and ``assemble`` are passed on; ``progress(done)`` hears of pieces made by anybody.
    """
    pieces = [folder / f"piece-{k:06d}" for k in range(count)]
    unreadable: set[Path] = set()

    def settle(k: int, *, wait: bool) -> None:
        if pieces[k].exists():
            return
        with held_lock(pieces[k].with_suffix(".lock"), wait=wait) as held:
            # In this order: the pieces vanish after the whole is there, so a piece that was seen missing
            # before the whole was seen missing has not been made.
            if not held or pieces[k].exists() or finished():
                return
            unfinished = pieces[k].with_suffix(".part")
            make(k, unfinished)
            _on_the_disk(unfinished)
            unfinished.rename(pieces[k])
        progress(pieces_done(folder))

    def join() -> None:
        try:
            assemble(pieces)
        except UnreadableError as error:
            if error.path in unreadable:
                raise OSError(f"{error.path} was made twice and cannot be read: {error.why}") from None
            unreadable.add(error.path)
            logger.warning(f"{error.path} is damaged ({error.why}): making it again")
            error.path.unlink()

    while not finished():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for wait in (False, True):
                for k in range(count):
                    settle((start + k) % count, wait=wait)
            with held_lock(folder / "assemble.lock", wait=True):
                # Whoever held the lock before may have found a piece that has to be made again.
                if not finished() and all(piece.exists() for piece in pieces):
                    join()
        except FileNotFoundError:
            # Another process finished and removed the folder under our feet; else it is an error.
            if not finished():
                raise
    progress(count)
    shutil.rmtree(folder, ignore_errors=True)


def pieces_done(folder: Path) -> int:
    """How many pieces are in the ``folder`` of ``make_together``; FileNotFoundError once all were put together."""
    return sum(name.startswith("piece-") and "." not in name for name in os.listdir(folder))


def _on_the_disk(path: Path) -> None:
    """A loss of power shall not leave the name of a file that is empty."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def held_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
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
        taken = _locked(file, path, fcntl.LOCK_EX, wait=wait)
    except ConfigError:
        file.close()
        raise
    if not taken:
        file.close()
        return None
    return file


def _locked(file: IO[Any], path: Path, how: int, *, wait: bool) -> bool:
    """Lock ``file``, which lies at ``path``; False where another process has it and we do not wait."""
    try:
        fcntl.flock(file, how | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            "data.cache_folder",
            f"the file system of {path.parent} cannot lock files ({error.strerror}); choose another",
        ) from None
    return True
