"""Tokens as Megatron-LM writes them.

The format is in ``tokens/megatron.py``, the order in which Megatron-LM trains on them in ``rows/megatron.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from torchtitan.config.paths import local_path
from torchtitan.data.datasets import DATASETS, OnBadRecord, TokenSource, needed
from torchtitan.data.datasets.nanoset import OrderSeed
from torchtitan.data.files import KEY
from torchtitan.errors import ConfigError
from torchtitan.log import logger

if TYPE_CHECKING:
    from torchtitan.data.tokens.megatron import Header, IndexedFile
    from torchtitan.data.tokens.store import Tokens

_SAMPLED_BLOCKS = 1 << 10

Part = Literal["train", "valid", "test"]
Split = Annotated[
    str | None,
    Field(
        min_length=1,
        description="shares of sequences for training, validation and test, of which part is read; none: "
        '"969, 30, 1" where part or data.order = "source" asks for shares, else all is read',
    ),
]
PartOf = Annotated[Part | None, Field(description="which share of the split; none: train")]


@DATASETS.register("megatron")
def build_megatron(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    order_seed: OrderSeed = None,
    split: Split = None,
    part: PartOf = None,
) -> TokenSource:
    """Tokens of Megatron-LM: ``X``, ``X.bin`` or ``X.idx``, a folder or a glob; several are one, in order of names."""
    from torchtitan.data.tokens.megatron import read_header

    path = needed(path, "megatron")
    headers = [read_header(prefix) for prefix in _prefixes(path)]
    return MegatronSource(path, headers, order_seed=order_seed, split=split, part=part)


def _prefixes(path: str) -> list[Path]:
    from torchtitan.data.tokens.mapped import find_token_files
    from torchtitan.data.tokens.megatron import with_ending

    prefix = local_path(path, KEY)
    if with_ending(prefix, ".idx").is_file() or with_ending(prefix, ".bin").is_file():
        return [prefix]
    return sorted({file.with_suffix("") for file in find_token_files(path, [".bin", ".idx"])})


class MegatronSource:
    """Files of Megatron-LM, as one, in the order of their names."""

    name = "megatron"

    def __init__(
        self, path: str, headers: list[Header], *, order_seed: int | None, split: str | None, part: Part | None
    ) -> None:
        self.order_options: Mapping[str, Any] = {} if order_seed is None else {"order_seed": order_seed}
        self.order_seed = 1234 if order_seed is None else order_seed
        self._headers, self._path, self._is_part = headers, path, split is not None or part is not None
        self.split, self.part = split or "969, 30, 1", part or "train"
        self.lacks_split = split is None and part is not None
        """A part was asked for and no split given: fine where Megatron-LM's own is meant."""
        tokens = sum(header.bin.stat().st_size // header.id_bytes for header in headers)
        if tokens == 0:
            raise ConfigError(KEY, f"there is no token in {path}")
        sequences = sum(header.sequences for header in headers)
        share = f"{self.part} of {self.split} of " if self._is_part else ""
        held = f"{len(headers)} file(s) with {tokens:,} tokens in {sequences:,} sequences"
        self.description = f"{share}{held} at {path}"

    def check_one_file(self) -> None:
        """ConfigError where there are several, of which Megatron-LM makes a blend."""
        if len(self._headers) > 1:
            raise ConfigError(
                KEY,
                f"{self._path} holds {len(self._headers)} data sets, and data.order = source is that of one; name one, "
                "or each as an entry of data.sources with a weight",
            )

    def open(self, vocab_size: int) -> Tokens:
        from torchtitan.data.tokens.mapped import JoinedTokens, PartOfTokens

        files = self.open_files(vocab_size)
        parts: list[Tokens] = [*files]
        if self._is_part:
            ranges = [(file, *file.token_range(self.split, self.part)) for file in files]
            parts = [PartOfTokens(file, first, last) for file, first, last in ranges if first < last]
            if not parts:
                raise ConfigError("data.args.split", f"{self.split!r} gives {self.part} no token of {self._path}")
        return parts[0] if len(parts) == 1 else JoinedTokens(parts)

    def open_files(self, vocab_size: int) -> list[IndexedFile]:
        """The tokens of each file that has any."""
        from torchtitan.data.tokens.mapped import mapping
        from torchtitan.data.tokens.megatron import open_indexed

        headers = [header for header in self._headers if header.sequences and header.bin.stat().st_size]
        logger.info(f"{self.name}: {self.description}")
        blocks = max(4, _SAMPLED_BLOCKS // len(headers))
        with mapping(len(headers)):
            return [open_indexed(header, vocab_size=vocab_size, sampled_blocks=blocks) for header in headers]
