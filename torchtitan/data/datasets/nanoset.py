"""Tokens as datatrove writes and Nanotron's Nanoset reads them.

The format is in ``tokens/datatrove.py``, the order in which Nanoset trains on them in ``rows/nanoset.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from torchtitan.data.datasets import DATASETS, OnBadRecord, TokenSource, needed
from torchtitan.data.files import KEY
from torchtitan.errors import ConfigError
from torchtitan.log import logger, note_once

if TYPE_CHECKING:
    from torchtitan.data.tokens.mapped import JoinedTokens, MappedTokens

_DTYPES = {2: "<u2", 4: "<u4"}
_SAMPLED_BLOCKS = 1 << 10

TokenBytes = Annotated[
    Literal[2, 4] | None, Field(description="bytes of an id, for files without .ds.metadata; none: as that says")
]
OrderSeed = Annotated[
    int | None,
    Field(ge=0, lt=1 << 32, description='seed of data.order = "source"; none: 1234, which is theirs as well'),
]


@DATASETS.register("nanoset")
def build_nanoset(
    path: str | None, on_bad_record: OnBadRecord, *, token_bytes: TokenBytes = None, order_seed: OrderSeed = None
) -> TokenSource:
    """Tokens of datatrove and Nanotron: a ``.ds`` file, a folder of them or a glob; several are one, by name."""
    from torchtitan.data.tokens.mapped import find_token_files

    path = needed(path, "nanoset")
    files = [_look_at(file, token_bytes) for file in find_token_files(path, [".ds"])]
    return NanosetSource(path, files, order_seed)


@dataclass(frozen=True)
class _File:
    path: Path
    dtype: str
    tokens: int


def _look_at(path: Path, token_bytes: int | None) -> _File:
    """What the names, the size and the metadata of a file say; ConfigError where they do not fit together."""
    from torchtitan.data.tokens.datatrove import metadata_path, read_metadata

    said = read_metadata(path)
    id_bytes = token_bytes if said is None else said[1]
    if id_bytes is None:
        raise ConfigError(
            KEY,
            f"{path} has no {metadata_path(path).name} to say how many bytes an id has; set data.args.token_bytes",
        )
    if said is not None and token_bytes not in (None, id_bytes):
        raise ConfigError("data.args.token_bytes", f"{metadata_path(path)} says {id_bytes}; leave this out")
    if id_bytes not in _DTYPES:
        raise ConfigError(KEY, f"{metadata_path(path)} says that an id has {id_bytes} bytes; 2 and 4 are read")
    size = path.stat().st_size
    if size % id_bytes:
        raise ConfigError(KEY, f"{path} has {size:,} bytes, which are no whole ids of {id_bytes}: it is cut off")
    if said is not None and said[2] * id_bytes != size:
        raise ConfigError(
            KEY,
            f"{path} has {size:,} bytes where its metadata says {said[2]:,} tokens of {id_bytes}: it is cut off, or "
            "not the file of this metadata",
        )
    if path.with_name(path.name + ".loss").exists():
        note_once(f"{path.name}.loss is not read: all tokens count in the loss ({path.parent})")
    return _File(path, _DTYPES[id_bytes], size // id_bytes)


class NanosetSource:
    """Files of datatrove, as one, in the order of their names."""

    name = "nanoset"

    def __init__(self, path: str, files: list[_File], order_seed: int | None) -> None:
        from torchtitan.data.tokens.datatrove import index_path

        self.order_options: Mapping[str, Any] = {} if order_seed is None else {"order_seed": order_seed}
        self.order_seed = 1234 if order_seed is None else order_seed
        self._files = files
        tokens = sum(file.tokens for file in files)
        if tokens == 0:
            raise ConfigError(KEY, f"there is no token in {path}: its {len(files)} file(s) are empty")
        indexed = sum(index_path(file.path).exists() for file in files)
        documents = "" if indexed == len(files) else ", documents unknown (not every file has an index)"
        self.description = f"{len(files)} file(s) with {tokens:,} tokens at {path}{documents}"

    def open(self, vocab_size: int) -> JoinedTokens | MappedTokens:
        from torchtitan.data.tokens.mapped import JoinedTokens

        parts = self.open_files(vocab_size)
        return parts[0] if len(parts) == 1 else JoinedTokens(parts)

    def open_files(self, vocab_size: int) -> list[MappedTokens]:
        """The tokens of each file that has any."""
        from torchtitan.data.tokens.datatrove import open_ds
        from torchtitan.data.tokens.mapped import mapping

        files = [file for file in self._files if file.tokens]
        logger.info(f"{self.name}: {self.description}")
        blocks = max(4, _SAMPLED_BLOCKS // len(files))
        with mapping(len(files)):
            return [open_ds(f.path, f.dtype, vocab_size=vocab_size, sampled_blocks=blocks) for f in files]
