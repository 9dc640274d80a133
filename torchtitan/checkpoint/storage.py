"""Steps on disk: which are complete, which files they hold, which are kept.

What is inside the files is not known here; see ``checkpointer.py``.

A step is written into ``step-N.partial`` and renamed to ``step-N`` once every file is on the disk and the manifest,
written last, lists each with its size and SHA-256. A folder without a manifest is never taken for a checkpoint.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan.errors import ConfigError
from torchtitan.log import logger

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"  # PyTorch's own index of a distributed checkpoint
_STEP = re.compile(r"step-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or could not be written: which, why, and what to do."""


class NewerFormat(CheckpointError):
    """A checkpoint of a version of this program that came later: whole, and nothing to pass over."""


@dataclass(frozen=True)
class FileRecord:
    """Size and content of one file of a step."""

    bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> "FileRecord":
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return FileRecord(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a complete step says of itself. ``state`` is JSON: numbers of the run that are no tensors."""

    step: int
    state: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        content = asdict(self)
        write_durably(folder / MANIFEST, json.dumps({**content, "sha256": _json_sha256(content)}, indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """CheckpointError if there is none or it cannot be read, NewerFormat if this program is too old for it."""
        try:
            raw = json.loads((folder / MANIFEST).read_text())
            own_sha256 = raw.pop("sha256")
            version = raw["format"]
            if version == FORMAT:
                if own_sha256 != _json_sha256(raw):
                    raise CheckpointError(f"{folder / MANIFEST} was changed after it was written")
                files = {name: FileRecord(**record) for name, record in raw["files"].items()}
                return Manifest(raw["step"], raw["state"], files, version)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error!r}") from None
        raise NewerFormat(f"{folder} has format {version}, and this version reads format {FORMAT}; update torchtitan")


def _json_sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damage(folder: Path, manifest: Manifest, names: Iterable[str], *, content: bool = True) -> str | None:
    """What is wrong with the files ``names`` of a step, or None: their sizes, and if asked their ``content``, are
    compared with the manifest."""
    for name in names:
        path, expected = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                return f"{path} has {size} bytes, the manifest says {expected.bytes}"
            if content and FileRecord.of(path).sha256 != expected.sha256:
                return f"{path} was changed after it was written (its SHA-256 is not the manifest's)"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    return None


class StepFolders:
    """The steps below one folder on a file system that all ranks see."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Where a step is written before it is complete."""
        return self.root / f"step-{step}.partial"

    def steps(self) -> list[int]:
        """Numbers of the complete steps, ascending."""
        return [step for step in self._folders() if (self.path(step) / MANIFEST).is_file()]

    def incomplete(self) -> list[int]:
        """Numbers of the folders named like a step that are none."""
        return [step for step in self._folders() if not (self.path(step) / MANIFEST).is_file()]

    def foreign(self) -> list[int]:
        """Numbers of steps that another program wrote: whole for it, but without our manifest."""
        return [step for step in self.incomplete() if (self.path(step) / METADATA).is_file()]

    def _folders(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def prepare(self, step: int) -> Path:
        """An empty folder to write ``step`` into."""
        folder = self.partial(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, step: int) -> None:
        """Give a fully written step its name. One of the same number makes room only at that moment."""
        final, old = self.path(step), self._replaced(step)
        if final.exists() and not (final / MANIFEST).exists():
            self._set_aside(final)  # not ours to delete
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        self.partial(step).rename(final)
        sync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def recover(self) -> None:
        """Give back its name to a step whose replacement was interrupted between two renames."""
        for old in self.root.glob("step-*.replaced"):
            final = old.with_suffix("")
            if not final.exists():
                old.rename(final)

    def _replaced(self, step: int) -> Path:
        return self.root / f"step-{step}.replaced"

    def discard(self, step: int) -> None:
        """Forget a step that could not be written."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def set_aside_after(self, step: int) -> list[int]:
        """Rename complete steps later than ``step``, so that a run that goes back to it does not jump to them later."""
        later = [s for s in self.steps() if s > step]
        for s in later:
            self._set_aside(self.path(s))
        return later

    def _set_aside(self, folder: Path) -> None:
        suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
        names = (self.root / f"{folder.name}.superseded{suffix}" for suffix in suffixes)
        folder.rename(next(name for name in names if not name.exists()))

    def retain(self, keep_latest: int) -> None:
        """Delete all complete steps but the newest ``keep_latest`` (0: none), and what killed saves left behind."""
        steps = self.steps()
        for step in steps[:-keep_latest] if keep_latest else []:
            # Renamed first: a removal that is interrupted must not leave half a step under its name.
            doomed = self.path(step).rename(self.root / f"step-{step}.removing")
            shutil.rmtree(doomed, ignore_errors=True)
        for leftover in self.root.glob("step-*"):
            if leftover.name.endswith((".partial", ".removing", ".replaced")):
                logger.info(f"removing {leftover}, which an interrupted save left behind")
                shutil.rmtree(leftover, ignore_errors=True)


def find_step(name: str) -> Path:
    """The step that ``checkpoint.initial_load_path`` means: itself, or the newest complete one below it."""
    path = Path(name)
    if (path / METADATA).is_file():
        return path
    for root in (path, path / "checkpoint"):
        if steps := StepFolders(root).steps():
            return StepFolders(root).path(steps[-1])
    raise ConfigError(
        "checkpoint.initial_load_path", "no checkpoint there: neither a step nor a folder with a complete one"
    )


def share(names: Sequence[str], rank: int, ranks: int) -> list[str]:
    """The file names that ``rank`` looks after."""
    return sorted(names)[rank::ranks]


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that a crash leaves the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)
