"""Folders of safetensors files: what they hold, checked before any of it is used, and any box of a tensor.

What the tensors mean is not known here, and new files are written by ``export.py``. No pickle is ever read.
"""

import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan.errors import CheckpointError, brief, one_line

CONFIG = "config.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST_JSON = 16 << 20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, and what it is."""

    name: str
    file: Path
    shape: torch.Size
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        """CheckpointError if these are no numbers that weights come in, but whole or quantised ones."""
        if self.kind not in DTYPES:
            only = ", ".join(DTYPES)
            raise CheckpointError(f"{self.file} holds {brief(self.name)} as {self.kind}; what is read are {only}")
        return DTYPES[self.kind]


class WeightFolder:
    """A folder of this machine with a ``config.json`` and weights: ``model.safetensors``, or files that a
    ``model.safetensors.index.json`` names. CheckpointError, by the file's name, for anything that is not as it says."""

    def __init__(self, folder: str | Path) -> None:
        if "://" in str(folder):
            raise CheckpointError(
                f"{folder} is a URL; weights are read from a folder of this machine, so copy it there"
            )
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
        self.config = read_json(self.folder / CONFIG)
        self.entries = self._entries()
        """What is there, by the name it has in the files."""

    def read(self, name: str, box: Sequence[slice] = (slice(None),)) -> Tensor:
        """A box of a tensor, or the whole; valid until the file changes."""
        path = self.entries[name].file
        # The file is opened for each tensor: what was read of one is let go with the last tensor of that opening.
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_slice(name)[tuple(box)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from None

    def _entries(self) -> dict[str, Entry]:
        index = self._only("model" + INDEX_SUFFIX, INDEX_SUFFIX)
        single = self._only("model" + SUFFIX, SUFFIX) if index is None else self.folder / ("model" + SUFFIX)
        if single is not None and single.exists():
            return _held(single)
        if index is None:
            raise CheckpointError(self._without_weights())
        named = _weight_map(index)
        files = {file: _held(self.folder / file, index) for file in sorted(set(named.values()))}
        for name, file in named.items():
            if name not in files[file]:
                raise CheckpointError(f"{self.folder / file} lacks {brief(name)}, which {index.name} says it holds")
        return {name: files[file][name] for name, file in named.items()}

    def _only(self, usual: str, suffix: str) -> Path | None:
        """The file called ``usual``, or the only one whose name ends so; CheckpointError if there are several."""
        found = sorted(path for path in self.folder.iterdir() if path.name.endswith(suffix))
        if self.folder / usual in found:
            return self.folder / usual
        if len(found) > 1:
            names = ", ".join(path.name for path in found[:3])
            raise CheckpointError(f"{self.folder} has {names} … and nothing that says which belong together ({usual})")
        return found[0] if found else None

    def _without_weights(self) -> str:
        for path in sorted(self.folder.iterdir()):
            if path.suffix in _PICKLES:
                return (
                    f"{path} is a pickle, which could run code and is never read; save the model once more with "
                    "safe_serialization=True, as model.safetensors"
                )
        return f"{self.folder} holds no weights: neither model{SUFFIX} nor model{INDEX_SUFFIX} is there"


def read_json(path: Path) -> dict[str, Any]:
    """The table of a JSON file of a stranger; CheckpointError if it is none, too large, or says a key twice."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path} is larger than {_LARGEST_JSON >> 20} MiB, which no such file is")
        return _table(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {brief(one_line(error))}") from None


def _held(path: Path, index: Path | None = None) -> dict[str, Entry]:
    """What the header of a file says; CheckpointError if the file is not as long as that, or not a file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing" + (f", which {index.name} names" if index else ""))
    held: dict[str, Entry] = {}
    try:
        with path.open("rb") as raw, safe_open(path, framework="pt") as file:  # which checks shapes, offsets and length
            _table(raw.read(*struct.unpack("<Q", raw.read(8))))
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_slice(name)
                held[name] = Entry(name, path, torch.Size(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or no such file: {brief(one_line(error))}") from None
    return held


def _weight_map(index: Path) -> dict[str, str]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f"{index} has no weight_map, which says what lies where")
    for name, file in named.items():
        if not isinstance(file, str) or not file.endswith(SUFFIX) or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{index} says that {brief(name)} lies in {brief(repr(file))}, which is no {SUFFIX} file beside it"
            )
    return named


def _table(content: bytes) -> dict[str, Any]:
    table = json.loads(content.decode(), object_pairs_hook=_once)
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    return table


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]} stands there twice")
    return table
