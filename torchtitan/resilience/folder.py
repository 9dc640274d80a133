"""The folder of a run: can it be written, and does no other run write there.

What is left in it is said by whoever leaves it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.errors import ConfigError

_KEY = "job.dump_folder"


def check_folder(folder: Path, key: str = _KEY) -> None:
    """ConfigError, on ``key``, if a run could not write below ``folder``; leaves nothing there."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    except OSError as error:  # of what cannot even be looked at
        raise ConfigError(key, f"is no path: {error.strerror}") from None
    if not existing.is_dir():
        kind = "a link to nothing" if not existing.exists() else "a file"
        raise ConfigError(key, f"{existing} is {kind}")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(key, f"{existing} cannot be written to ({error.strerror})") from None


@contextmanager
def own_folder(folder: Path, key: str = _KEY) -> Iterator[None]:
    """Make ``folder`` and keep other runs out of it until the block ends or this process dies; ConfigError, on ``key``,
    if it cannot be made or another run holds it."""
    import fcntl  # not on Windows, where a command must get as far as saying so

    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(key, f"cannot be made: {error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(key, f"another run is writing to {folder}; end it, or choose another folder") from None
    except OSError:
        pass  # a file system without locks keeps nobody out
    try:
        yield
    finally:
        os.close(descriptor)
