"""What a complete step says of itself: its files with their sizes and hashes, and the numbers of the run.

Which folder is a step, and which are kept, is in ``storage.py``.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from upath import UPath

from torchtitan.checkpoint.places import FileRecord, is_file_name, shown_bytes, storage_errors, write_durably
from torchtitan.errors import CheckpointError, brief, one_line

FORMAT = 1
MANIFEST = "manifest.json"
_LARGEST = 32 << 20  # of 200,000 files; a stranger's is refused before it is read


class NewerFormat(CheckpointError):
    """A checkpoint of a version of this program that came later: whole, and nothing to pass over."""


class Numbers(Protocol):
    """A part whose state is JSON. ``load_state_dict`` raises ConfigError where it does not fit the configuration."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Manifest:
    """``state`` is JSON: numbers of the run that are no tensors. Of an export ``step`` is the one it was made at."""

    step: int
    state: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    format: int = FORMAT

    def write(self, folder: UPath) -> None:
        content = asdict(self)
        write_durably(folder / MANIFEST, json.dumps({**content, "sha256": _json_sha256(content)}, indent=1) + "\n")

    @staticmethod
    def read(folder: UPath) -> "Manifest":
        """CheckpointError if there is none or it cannot be read, NewerFormat if this program is too old for it."""
        try:
            with storage_errors(folder):
                if (size := (folder / MANIFEST).stat().st_size) > _LARGEST:
                    raise ValueError(f"it has {shown_bytes(size)}, more than any that was written here")
                raw = json.loads((folder / MANIFEST).read_text())
            own_sha256 = raw.pop("sha256")
            version = raw["format"]
            if version == FORMAT:
                if own_sha256 != _json_sha256(raw):
                    raise CheckpointError(f"{folder / MANIFEST} was changed after it was written")
                files = {name: FileRecord(**record) for name, record in raw["files"].items()}
                if (problem := _problem(raw["step"], raw["state"], files)) is not None:
                    raise ValueError(problem)
                return Manifest(raw["step"], raw["state"], files, version)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = brief(f"{type(error).__name__}: {one_line(error)}")  # of a damaged byte, all that is around it
            raise CheckpointError(f"{folder / MANIFEST} cannot be read: {said}") from None
        raise NewerFormat(f"{folder} has format {version}, and this version reads format {FORMAT}; update torchtitan")


def damage(folder: UPath, manifest: Manifest, names: Iterable[str], *, content: bool = True) -> str | None:
    """What is wrong with the first bad one of the files ``names``, or None: their sizes, and if asked their
    ``content``, are compared with the manifest."""
    return next(damages(folder, manifest, names, content=content), None)


def damages(folder: UPath, manifest: Manifest, names: Iterable[str], *, content: bool = True) -> Iterator[str]:
    """What is wrong with each bad one of the files ``names``."""
    for name in names:
        path, expected = folder / name, manifest.files[name]
        try:
            with storage_errors(folder):
                size = path.stat().st_size
            if size != expected.bytes:
                yield f"{path} has {size} bytes, the manifest says {expected.bytes}"
            elif content and FileRecord.of(path).sha256 != expected.sha256:
                yield f"{path} was changed after it was written (its SHA-256 is not the manifest's)"
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror or error}"


def _problem(step: Any, state: Any, files: Mapping[str, FileRecord]) -> str | None:
    """What a manifest says that no manifest of ours does; anybody can write one with the right hash."""
    if type(step) is not int or step < 0:
        return f"{brief(repr(step))} is no step"
    if not isinstance(state, dict) or not all(isinstance(part, dict) for part in state.values()):
        return "its state is no table of tables"
    for name, record in files.items():
        if not is_file_name(name):
            return f"{brief(repr(name))} is no file of its folder"
        if type(record.bytes) is not int or not 0 <= record.bytes < 2**63:
            return f"{name} cannot have {brief(repr(record.bytes))} bytes"
    return None


def _json_sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
