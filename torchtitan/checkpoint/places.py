"""Where checkpoints lie: a folder on a file system, or a URL such as s3://bucket/run, both by pathlib's methods.

What the files mean is not known here. Names with ``://`` go through fsspec; credentials and endpoints are those that
the environment gives its file systems, and nothing is cached between two looks.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from uuid import uuid4

from upath import UPath

from torchtitan.errors import ConfigError, one_line

_BLOCK = 1 << 20
_URL_OF_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/")


def place(name: str, *, base: str | os.PathLike[str] = "", key: str) -> UPath:
    """The folder that ``name`` means: a URL as it is, else a path below ``base``; ConfigError, on ``key``, for a URL
    that nothing here can open."""
    if "://" not in name:
        if typed := _URL_OF_ONE_SLASH.match(name):
            raise ConfigError(key, f"looks like a URL that lost a slash; {typed[1]}:// has two, and a folder ./{name}")
        return UPath(pathlib.Path(base) / name)
    url = urlsplit(name)
    if url.scheme in ("file", "local"):
        path = name.partition("://")[2]
        if not path.startswith("/"):
            raise ConfigError(key, f"names a machine; a folder of this one is {url.scheme}:///{path}")
        return UPath(path)
    if url.username or url.password:
        raise ConfigError(key, "credentials do not belong into a URL; give them to the file system by its environment")
    if not url.scheme:
        raise ConfigError(key, "is no URL: it names no file system")
    try:
        found = UPath(name, use_listings_cache=False)
        (found / "step-0").exists()  # a folder below it, for which a bucket is needed
    except ImportError as error:
        raise ConfigError(key, f"{url.scheme}:// needs a package that is not installed: {one_line(error)}") from None
    except ValueError as error:
        raise ConfigError(key, f"no file system is known for it, or no such place there ({one_line(error)})") from None
    except Exception as error:  # whatever a server or a client of one says
        raise ConfigError(key, f"{name} cannot be reached: {one_line(error)}") from None
    return found


def is_local(path: UPath) -> bool:
    """Whether ``path`` lies on a file system of this machine, where names change at once and content is flushed."""
    return isinstance(path, pathlib.Path)


def _here(path: UPath) -> pathlib.Path:
    assert isinstance(path, pathlib.Path)
    return path


@contextlib.contextmanager
def storage_errors(path: UPath) -> Iterator[None]:
    """Within, what a remote storage reports in its own terms is an OSError, as it is on a file system."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        if is_local(path) or library in ("builtins", "torch", "torchtitan"):
            raise
        raise OSError(f"{path}: {one_line(error)}") from error


def check_remote(folder: UPath, key: str) -> None:
    """ConfigError, on ``key``, if nothing can be written below a remote ``folder``; leaves nothing there."""
    probe = folder / f".probe-{uuid4().hex}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except Exception as error:  # whatever a server or a client of one says
        raise ConfigError(key, f"{folder} cannot be written to ({one_line(error)})") from None


def free_bytes(folder: UPath) -> int | None:
    """Room that is left where ``folder`` lies; None where nobody knows."""
    if not is_local(folder):
        return None
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(_here(existing)).free


def shown_bytes(count: float) -> str:
    """A number of bytes as a person reads it, with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def write_durably(path: UPath, text: str) -> None:
    """Replace ``path`` by ``text`` so that a crash leaves the old content or the new."""
    if not is_local(path):
        with storage_errors(path):
            path.write_text(text)
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: UPath) -> None:
    """Wait until the folder's entries are on the disk."""
    if not is_local(path):
        return
    descriptor = os.open(_here(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: UPath, *, first: str) -> None:
    """Delete ``folder`` and all below it, if it is there; the file ``first`` before all others."""
    with storage_errors(folder):
        if is_local(folder) and _here(folder).is_symlink():
            folder.unlink()  # what it points to was put elsewhere by somebody
            return
        (folder / first).unlink(missing_ok=True)
        if is_local(folder):
            shutil.rmtree(_here(folder), ignore_errors=True)
        elif folder.exists():
            folder.fs.rm(folder.path, recursive=True)


def move(folder: UPath, target: UPath, *, first: str) -> None:
    """Rename ``folder``. Where that is no single act, the file ``first`` vanishes before the others, once all of them
    have been copied."""
    if is_local(folder):
        folder.rename(target)
        return
    with storage_errors(folder):
        folder.fs.copy(folder.path, target.path, recursive=True)
        remove(folder, first=first)


@dataclass(frozen=True)
class FileRecord:
    """Size and content of one file."""

    bytes: int
    sha256: str

    @staticmethod
    def of(path: UPath) -> "FileRecord":
        digest, size = hashlib.sha256(), 0
        with storage_errors(path), path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
        return FileRecord(size, digest.hexdigest())


class RecordedFile:
    """A new file, written from front to end within a ``with`` block and flushed to the disk once, in its end; then
    ``record`` says what it is. OSError where storage fails, whatever the writer makes of that."""

    def __init__(self, path: UPath) -> None:
        self.path = path
        self._digest, self._size = hashlib.sha256(), 0
        self._failure: BaseException | None = None

    def open(self) -> BinaryIO:
        """The file itself."""
        with storage_errors(self.path):
            return self.path.open("wb")

    def __enter__(self) -> "RecordedFile":
        self._file = self.open()
        return self

    def write(self, block: Any) -> int:
        with self._failures():
            self._file.write(block)
        length = memoryview(block).nbytes
        self._digest.update(block)
        self._size += length
        return length

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Not at every tensor: once, in the end."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            with self._failures():
                self._file.flush()
                if is_local(self.path):
                    os.fsync(self._file.fileno())
                self._file.close()
            return
        with contextlib.suppress(Exception):
            self._file.close()
        if self._failure is not None:
            raise self._failure from None

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What goes wrong within is remembered: torch tells of it as of something else."""
        try:
            with storage_errors(self.path):
                yield
        except BaseException as error:
            self._failure = error
            raise


def is_file_name(name: Any) -> bool:
    """Whether ``name``, which a stranger may have written, is that of a file in a folder and of none elsewhere."""
    return isinstance(name, str) and name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\:")


def share(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """The file names that ``rank`` looks after."""
    return sorted(names)[rank::ranks]
