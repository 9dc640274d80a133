"""Which folders are steps of a run: which are complete, which are kept, how one gets its name.

What is inside is said by ``manifest.py`` and ``dcp.py``.

On a file system a step is written into ``step-N.partial`` and renamed to ``step-N`` once every file is on the disk and
the manifest, written last, lists each with its size and SHA-256. Where nothing can be renamed at once, such as in a
bucket, it is written into ``step-N`` beside a mark, and the manifest alone makes it complete. A folder without a
manifest is never taken for a checkpoint.
"""

import itertools
import re

from upath import UPath

from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.checkpoint.places import is_local, move, one_line, place, remove, storage_errors, sync_folder
from torchtitan.errors import ConfigError
from torchtitan.log import logger

METADATA = ".metadata"  # PyTorch's own index of a distributed checkpoint
BEING_WRITTEN = "being-written"  # beside the files of a step in a bucket until it is complete
_STEP = re.compile(r"step-(\d+)")
_FOLDER = re.compile(r"step-\d+(-export)?")


def step_folders(root: UPath) -> "StepFolders":
    """The steps below ``root``, by the means that its file system has."""
    return StepFolders(root) if is_local(root) else StepsInBucket(root)


class StepFolders:
    """The steps below one folder on a file system that all ranks see."""

    def __init__(self, root: UPath) -> None:
        self.root = root

    def path(self, step: int) -> UPath:
        return self.root / f"step-{step}"

    def export(self, step: int) -> UPath:
        """Where weights alone lie beside a step, for others to read."""
        return self.root / f"step-{step}-export"

    def steps(self) -> list[int]:
        """Numbers of the complete steps, ascending."""
        return [step for step in self._numbers() if is_complete(self.path(step))]

    def incomplete(self) -> list[int]:
        """Numbers of the folders named like a step that are none."""
        return [step for step in self._numbers() if not is_complete(self.path(step))]

    def foreign(self) -> list[int]:
        """Numbers of steps that another program wrote: whole for it, but without our manifest."""
        return [step for step in self.incomplete() if (self.path(step) / METADATA).is_file()]

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for folder in self._named("step-*") if (match := _STEP.fullmatch(folder.name)))

    def _named(self, pattern: str) -> list[UPath]:
        with storage_errors(self.root):
            if not self.root.is_dir():
                return []
            return [entry for entry in self.root.glob(pattern) if entry.is_dir()]

    # Writing one: prepare, then commit or discard.

    def partial(self, folder: UPath) -> UPath:
        """Where ``folder`` is written before it is complete."""
        return folder.with_name(folder.name + ".partial")

    def prepare(self, folder: UPath) -> None:
        """Make an empty folder in which to write ``folder``."""
        partial = self.partial(folder)
        remove(partial, first=MANIFEST)
        partial.mkdir(parents=True)

    def commit(self, folder: UPath) -> None:
        """Give a fully written folder its name. One of the same name makes room only at that moment."""
        old = folder.with_name(folder.name + ".replaced")
        if folder.exists() and not is_complete(folder):
            self._set_aside(folder)  # not ours to delete
        if folder.exists():
            remove(old, first=MANIFEST)
            folder.rename(old)
        self.partial(folder).rename(folder)
        sync_folder(self.root)
        _remove_if_possible(old)  # the new one has its name, whatever becomes of this one

    def discard(self, folder: UPath) -> None:
        """Forget a folder that could not be written."""
        remove(self.partial(folder), first=MANIFEST)

    def recover(self) -> None:
        """Give back its name to a folder whose replacement was interrupted between two renames."""
        for old in self._named("step-*.replaced"):
            final = old.with_suffix("")
            if not final.exists():
                old.rename(final)

    def sweep(self) -> None:
        """Remove what killed saves and removals left behind; none may be in progress."""
        for leftover in self._leftovers():
            logger.info(f"removing {leftover}, which an interrupted save left behind")
            _remove_if_possible(leftover)

    # Those that are no longer wanted

    def set_aside_after(self, step: int) -> list[int]:
        """Rename complete steps later than ``step``, so that a run that goes back to it does not jump to them later."""
        later = [s for s in self.steps() if s > step]
        for s in later:
            self._set_aside(self.path(s))
        return later

    def _set_aside(self, folder: UPath) -> None:
        suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
        names = (self.root / f"{folder.name}.superseded{suffix}" for suffix in suffixes)
        move(folder, next(name for name in names if not name.exists()), first=MANIFEST)

    def retain(self, keep_latest: int, keep_every: int | None = None) -> None:
        """Delete all complete steps but the newest ``keep_latest`` (0: none) and the multiples of ``keep_every``."""
        steps = self.steps()
        for step in steps[:-keep_latest] if keep_latest else []:
            if keep_every is None or step % keep_every:
                self._delete(self.path(step))

    def _delete(self, folder: UPath) -> None:
        # Renamed first: a removal that is interrupted must not leave half a step under its name.
        doomed = folder.rename(folder.with_name(folder.name + ".removing"))
        remove(doomed, first=MANIFEST)

    def _leftovers(self) -> list[UPath]:
        return [f for f in self._named("step-*") if f.name.endswith((".partial", ".removing", ".replaced"))]


class StepsInBucket(StepFolders):
    """Where a name is not changed at once: the manifest, written last and deleted first, is all that counts."""

    def partial(self, folder: UPath) -> UPath:
        return folder

    def prepare(self, folder: UPath) -> None:
        with storage_errors(folder):
            if folder.exists() and not is_complete(folder) and not (folder / BEING_WRITTEN).exists():
                self._set_aside(folder)  # not ours to delete
            remove(folder, first=MANIFEST)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / BEING_WRITTEN).write_text("")

    def commit(self, folder: UPath) -> None:
        with storage_errors(folder):
            (folder / BEING_WRITTEN).unlink(missing_ok=True)

    def recover(self) -> None:
        """Nothing is ever between two names."""

    def _delete(self, folder: UPath) -> None:
        with storage_errors(folder):
            (folder / BEING_WRITTEN).write_text("")  # ours to delete, if this is interrupted
        remove(folder, first=MANIFEST)

    def _leftovers(self) -> list[UPath]:
        return [
            folder
            for folder in self._named("step-*")
            if _FOLDER.fullmatch(folder.name) and not is_complete(folder) and (folder / BEING_WRITTEN).exists()
        ]


def _remove_if_possible(folder: UPath) -> None:
    try:
        remove(folder, first=MANIFEST)
    except OSError as error:
        logger.warning(f"{folder} is not needed any more, but cannot be removed: {one_line(error)}")


def is_complete(folder: UPath) -> bool:
    """Whether everything in it was written."""
    with storage_errors(folder):
        return bool((folder / MANIFEST).is_file())


def find_step(name: str, key: str = "checkpoint.initial_load_path") -> UPath:
    """The step that ``name`` means: itself, or the newest complete one below it. ConfigError, on ``key``, if none."""
    path = place(name, key=key)
    with storage_errors(path):
        if (path / METADATA).is_file():
            return path
        for root in (path, path / "checkpoint"):
            folders = step_folders(root)
            if steps := folders.steps():
                return folders.path(steps[-1])
    raise ConfigError(key, "no checkpoint there: neither a step nor a folder with a complete one")
