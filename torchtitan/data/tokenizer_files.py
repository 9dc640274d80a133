"""Files of tokenizers: told one kind from another, found in a folder, read.

What stands in them is understood by the modules of tokenizers/.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config.paths import local_path
from torchtitan.data.tokenizer import KEY
from torchtitan.errors import ConfigError, listed

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class FileKind:
    name: str
    """As ``tokenizer.name`` has it."""
    what: str
    names: tuple[str, ...]
    """Where such a file lies in a folder, most likely first."""


HUGGING_FACE = FileKind("hf", "a tokenizer.json", ("tokenizer.json",))
RANKS = FileKind(
    "tiktoken", "a tiktoken rank file", ("tokenizer.model", "original/tokenizer.model", "*.tiktoken", "*.model")
)
SENTENCEPIECE = FileKind(
    "sentencepiece",
    "a sentencepiece model",
    ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "original/tokenizer.model", "*.model"),
)


def find_tokenizer_file(path: str, kind: FileKind) -> Path:
    """The file of a kind that ``model.hf_assets_path`` means: that file, or the one in that folder.

    ConfigError where there is none, which says of what kind the others are, and where there are several.
    """
    if path == "":
        raise ConfigError(KEY, f"tokenizer.name = {kind.name} needs {kind.what} here, or the folder that holds it")
    given = local_path(path, KEY)
    if given.is_dir():
        return _in_folder(given, path, kind)
    if not given.is_file():
        raise ConfigError(KEY, f"there is no file or folder {path} (working directory {os.getcwd()})")
    other = file_kind(given)
    if other not in (kind, None):
        raise ConfigError(KEY, f"{given} is {_as_other(other)}")
    return given


def _in_folder(folder: Path, path: str, kind: FileKind) -> Path:
    others: dict[Path, FileKind] = {}
    for name in kind.names:
        found = []
        for file in sorted(folder.glob(name)):
            other = file_kind(file) if file.is_file() else None
            if other == kind or (other is None and file.is_file() and "*" not in name):
                found.append(file)
        if len(found) > 1:
            raise ConfigError(KEY, f"{path} holds several: {listed(file.name for file in found)}; name one of them")
        if found:
            return found[0]
    for other_kind in (HUGGING_FACE, RANKS, SENTENCEPIECE):
        for file in (f for name in other_kind.names for f in sorted(folder.glob(name)) if f.is_file()):
            if file_kind(file) == other_kind != kind:
                others.setdefault(file.relative_to(folder), other_kind)
    held = listed(sorted(p.name for p in folder.iterdir())) if any(folder.iterdir()) else "nothing"
    hint = next((f"; {file} is {_as_other(other)}" for file, other in others.items()), "")
    raise ConfigError(KEY, f"no {kind.what.removeprefix('a ')} in {path} (it holds {held}){hint}")


def _as_other(kind: FileKind | None) -> str:
    assert kind is not None
    return f'{kind.what}: set tokenizer.name = "{kind.name}" for it'


def file_kind(file: Path) -> FileKind | None:
    """Which kind of tokenizer's file it is by its first bytes, None where it is none or cannot be told."""
    head = read_tokenizer_file(file, 4096)
    if head.startswith(_LFS):
        raise ConfigError(KEY, f"{file} is a pointer of Git LFS and not the file itself; fetch it with git lfs pull")
    if head.lstrip().startswith(b"{"):
        return HUGGING_FACE
    if _RANK_LINE.match(head):
        return RANKS
    # Protocol buffers: field 1 of the model is a piece, field 1 of a piece its text, and the first piece is short.
    return SENTENCEPIECE if head[:1] == head[2:3] == b"\n" else None


def read_tokenizer_file(file: Path, size: int = -1) -> bytes:
    """The file, or its first ``size`` bytes; ConfigError where it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return stream.read(size)
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {file}: {error.strerror}") from None
