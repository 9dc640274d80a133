"""Which folders are steps of a run: which are complete, which are kept, how one gets its name.

What is inside is said by ``manifest.py`` and ``dcp/``.

On a file system a step is written into ``step-N.partial`` and renamed to ``step-N`` once every file is on the disk and
the manifest, written last, lists each with its size and SHA-256. Where nothing can be renamed at once, such as in a
bucket, it is written into ``step-N`` beside a mark, and the manifest alone makes it complete. A folder without a
manifest is never taken for a checkpoint.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from upath import UPath

from torchtitan.checkpoint.manifest import MANIFEST, Manifest
from torchtitan.checkpoint.places import is_local, move, place, remove, storage_errors, sync_folder
from torchtitan.errors import CheckpointError, ConfigError, one_line
from torchtitan.log import logger

METADATA = ".metadata"  # PyTorch's own index of a distributed checkpoint
BEING_WRITTEN = "being-written"  # beside the files of a step in a bucket until it is complete
_START = "checkpoint.initial_load_path"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")  # as it is written: step-007 is somebody else's
_FOLDER = re.compile(rf"{_STEP.pattern}(-export)?")
_LEFTOVER = re.compile(rf"{_FOLDER.pattern}\.(partial|removing|replaced)")


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
        replaces = folder.exists()
        if replaces:
            remove(old, first=MANIFEST)
            folder.rename(old)
        self.partial(folder).rename(folder)
        sync_folder(self.root)
        if replaces:
            _sweep(old)  # what has its name is saved, whatever becomes of the old one

    def discard(self, folder: UPath) -> None:
        """Forget a folder that could not be written."""
        remove(self.partial(folder), first=MANIFEST)

    def recover(self) -> None:
        """Give back its name to a folder whose replacement was interrupted between two renames, and delete what killed
        saves left behind."""
        for old in self._leftovers():
            final = old.with_suffix("")
            if old.suffix == ".replaced" and not final.exists():
                old.rename(final)
        self.sweep()

    def sweep(self) -> None:
        """Remove what killed saves and removals left behind; none may be in progress."""
        for leftover in self._leftovers():
            _sweep(leftover)

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
        return [folder for folder in self._named("step-*") if _LEFTOVER.fullmatch(folder.name)]


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


def _sweep(folder: UPath) -> None:
    if not folder.exists():
        return
    try:
        remove(folder, first=MANIFEST)
        logger.info(f"removed {folder}, which nobody needs any more")
    except OSError as error:
        logger.warning(f"{folder} is not needed any more, but cannot be removed: {one_line(error)}")


def is_complete(folder: UPath) -> bool:
    """Whether everything in it was written."""
    with storage_errors(folder):
        return bool((folder / MANIFEST).is_file())


def check_start(folders: StepFolders, load_step: int = -1) -> None:
    """ConfigError if a run cannot go on in ``folders``: from the newest step, or from ``load_step`` if it is not -1."""
    steps = folders.steps()
    if not steps and (foreign := folders.foreign()):
        raise ConfigError(
            "checkpoint.folder",
            f"{folders.path(foreign[-1])} was written by another program; to start from it, name it as "
            "checkpoint.initial_load_path and save elsewhere",
        )
    if load_step >= 0 and load_step not in steps and not steps_since(folders, load_step):
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            "checkpoint.load_step", f"no complete step of that number in {folders.root}; there are: {known}"
        )


def steps_since(folders: StepFolders, load_step: int) -> list[int]:
    """The complete steps of a run that has gone back to ``load_step`` already, which need not be there any more."""
    later = [step for step in folders.steps() if step > load_step]
    gone_back = any(start_of(folders.path(step)).get("went_back_to") == load_step for step in reversed(later))
    return later if gone_back else []


def start_of(folder: UPath) -> Mapping[str, Any]:
    """What a complete step says of how its run began; nothing if that cannot be read."""
    try:
        start: Mapping[str, Any] = Manifest.read(folder).state.get("start", {})
    except CheckpointError:
        return {}
    return start


def find_step(name: str, key: str = _START) -> UPath:
    """The step that ``name`` means: itself, or the newest one below it that is complete or another
    program's. ConfigError, on ``key``, if none."""
    path = place(name, key=key)
    with storage_errors(path):
        if (path / METADATA).is_file():
            return path
        for root in (path, path / "checkpoint"):
            folders = step_folders(root)
            if steps := folders.steps() or folders.foreign():
                return folders.path(steps[-1])
        if key == _START and next(iter(path.glob("*.safetensors")), None) is not None:
            raise ConfigError(key, "a Hugging Face model lies there; set checkpoint.initial_load_in_hf = true")
    raise ConfigError(key, "no checkpoint there: neither a step nor a folder with a complete one")
