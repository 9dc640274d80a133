"""What lies below a path: which steps, whether each is complete and if not why, and what is inside.

Whether files are sound is in ``verification.py``; how it is shown, in ``tables.py``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from time import time as now

from upath import UPath

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.manifest import MANIFEST, Manifest, NewerFormat
from torchtitan.checkpoint.places import is_local, place, storage_errors
from torchtitan.checkpoint.storage import BEING_WRITTEN, METADATA
from torchtitan.checkpoint.titan import holds_run
from torchtitan.config.toml import parse
from torchtitan.errors import CheckpointError, ConfigError

_STEP = re.compile(r"step-(?P<number>\d+)(?P<export>-export)?(?P<rest>\..+)?")
_SILENT_SECONDS = 600.0  # nobody has written for so long: nobody writes any more

COMPLETE, EXPORT, FOREIGN, HUGGING_FACE = "complete", "export", "foreign", "hugging face"
MEANING = {
    COMPLETE: "complete",
    EXPORT: "complete: weights alone, beside a step",
    FOREIGN: "another program's, without manifest",
    HUGGING_FACE: "weights in Hugging Face form",
    "superseded": "set aside: the run went back to an earlier step",
    "being written": "not complete: being written",
    "interrupted": "not complete: left by a save that was killed",
    "newer": "of a newer format: update torchtitan",
    "damaged": "its manifest is damaged",
    "unknown": "not a checkpoint",
}


@dataclass(frozen=True)
class Step:
    """One folder. ``state`` is a key of MEANING; ``files`` are those that count, in bytes; ``written`` is a time in
    seconds since 1970, of the manifest or of the newest file."""

    folder: UPath
    number: int | None
    state: str
    note: str
    files: dict[str, int] = field(repr=False)
    written: float | None
    manifest: Manifest | None = field(default=None, repr=False)

    @cached_property
    def reader(self) -> Reader | None:
        """Its tensors; None where it has no index. CheckpointError where that cannot be read."""
        return Reader(self.folder) if (self.folder / METADATA).is_file() else None

    @cached_property
    def contents(self) -> "Contents | None":
        """None where no tensors can be told."""
        try:
            return None if self.reader is None else Contents.of(self.reader)
        except CheckpointError:
            return None


@dataclass(frozen=True)
class Contents:
    """``parameters`` are the elements of all weights, ``dtypes`` their types."""

    tensors: int
    parameters: int
    dtypes: list[str]

    @staticmethod
    def of(reader: Reader) -> "Contents":
        weights = [reader.tensors[name] for name in reader.weights]
        dtypes = sorted({dtype_name(entry.properties.dtype) for entry in weights})
        return Contents(len(reader.tensors), sum(entry.size.numel() for entry in weights), dtypes)


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def steps_at(name: str) -> tuple[list[Step], bool]:
    """The steps that ``name`` means, by number, and whether it is a single step's folder.

    A path or URL of a step, of a folder of steps, or of a run; ConfigError if it is nothing of these.
    """
    path = place(name, key="PATH")  # not the name, which may hold a secret
    with storage_errors(path):
        if not path.exists():
            raise ConfigError(name, "there is no such folder")
        if not path.is_dir():
            raise ConfigError(name, "is a file; name a run's folder, a checkpoint folder or a step's folder")
        if _is_step(path):
            return [look_at(path)], True
        for root in _roots(path):
            if found := [entry for entry in _folders(root) if _STEP.fullmatch(entry.name)]:
                return sorted(map(look_at, found), key=lambda step: (step.number or 0, step.folder.name)), False
    raise ConfigError(name, "no checkpoint there: neither a step nor a folder of steps")


def newest(steps: Iterable[Step]) -> Step | None:
    """The complete one that a run would go on from."""
    return max((s for s in steps if s.state == COMPLETE), key=lambda step: step.number or 0, default=None)


def look_at(folder: UPath) -> Step:
    """What one folder is, by its name and its files."""
    named = _STEP.fullmatch(folder.name)
    number = int(named["number"]) if named else None
    rest = named["rest"] or "" if named else ""
    if not (folder / MANIFEST).is_file() or rest.startswith((".partial", ".removing", ".replaced")):
        return _without_manifest(folder, number, rest)
    written = _modified(folder / MANIFEST)
    try:
        manifest = Manifest.read(folder)
    except NewerFormat as error:
        return Step(folder, number, "newer", str(error), _sizes(folder), written)
    except CheckpointError as error:
        return Step(folder, number, "damaged", str(error), _sizes(folder), written)
    state = "superseded" if rest else EXPORT if named and named["export"] else COMPLETE
    files = {name: record.bytes for name, record in manifest.files.items()}
    return Step(folder, manifest.step, state, MEANING[state], files, written, manifest)


def _without_manifest(folder: UPath, number: int | None, rest: str) -> Step:
    files = _sizes(folder)
    written = max((at for name in files if (at := _modified(folder / name))), default=None)
    if rest.startswith((".partial", ".removing", ".replaced")) or BEING_WRITTEN in files:
        quiet = now() - (written or 0.0)
        state = "being written" if quiet < _SILENT_SECONDS and rest in ("", ".partial") else "interrupted"
    elif METADATA in files:
        state = FOREIGN
    elif any(name.endswith(".safetensors") for name in files):
        state = HUGGING_FACE
    else:
        state = "interrupted" if any(name.endswith(".distcp") for name in files) else "unknown"
    note = MEANING[state]
    if state == FOREIGN:
        try:
            note += f": {'a run of TorchTitan' if holds_run(Reader(folder)) else 'weights alone'}"
        except CheckpointError as error:
            note = str(error)
    return Step(folder, number, state, note, files, written)


def _is_step(path: UPath) -> bool:
    if _STEP.fullmatch(path.name) or any((path / name).is_file() for name in (METADATA, MANIFEST)):
        return True
    return any(entry.suffix == ".safetensors" for entry in path.iterdir())


def _roots(path: UPath) -> list[UPath]:
    """Where the steps of a run in ``path`` may lie."""
    roots = [path, path / "checkpoint"]
    try:
        told = parse((path / "config.toml").read_text())["checkpoint"]["folder"]
        roots.insert(1, place(told, base=str(path), key="checkpoint.folder") if is_local(path) else path / told)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return roots


def _folders(root: UPath) -> list[UPath]:
    return [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []


def _sizes(folder: UPath) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir()) if entry.is_file()}


def _modified(path: UPath) -> float | None:
    return float(path.stat().st_mtime) or None  # some storages do not tell
