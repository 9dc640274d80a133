"""A text source made into token files by several processes, which may be killed and go on.

What the files look like is in the module of their format; the command, with its bar and its words, in
``commands/prepare.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from torchtitan.data.datasets import TextSource
from torchtitan.data.sharing import make_together, pieces_done
from torchtitan.data.tokens import datatrove, megatron
from torchtitan.data.tokens.cache import add_pieces, empty
from torchtitan.data.tokens.encode import Encoding, encode_piece
from torchtitan.data.tokens.store import TokenWriter
from torchtitan.errors import ConfigError

Format = Literal["ds", "megatron"]
_ENDINGS: dict[str, tuple[str, ...]] = {"ds": (".ds", ".ds.index", ".ds.metadata"), "megatron": (".idx", ".bin")}


@dataclass(frozen=True)
class Result:
    """What one process did: tokens it made, and, where it was the one that put all together, what is in the files."""

    made_tokens: int
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    first_skipped: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class Preparation:
    """``source`` as tokens in files that are called ``out`` and the endings of ``format``."""

    source: TextSource
    encoding: Encoding
    out: Path
    format: Format

    @property
    def files(self) -> list[Path]:
        """What is written; the first appears last."""
        return [self.out.with_name(self.out.name + ending) for ending in _ENDINGS[self.format]]

    @property
    def work(self) -> Path:
        """The folder of the pieces that are done, as long as not all are."""
        return self.out.with_name(self.out.name + ".work")

    @property
    def dtype(self) -> str:
        """The type of the ids."""
        return self.encoding.dtype if self.format == "ds" else megatron.id_dtype(self.encoding.limit)

    def begin(self) -> int:
        """Make the folder of pieces, or go on in it; how many are there. ConfigError where files are in the way, or
        pieces of something else."""
        for file in self.files:
            if file.exists():
                raise ConfigError("OUT", f"{file} is there already; remove it, or give another name")
        facts = json.dumps(
            {"source": self.source.fingerprint, "pieces": self.source.num_pieces, **self.encoding.facts()}
        )
        recipe = self.work / "recipe.json"
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            done = self.pieces_done()
            if not done:
                recipe.with_suffix(".part").write_text(facts)
                recipe.with_suffix(".part").rename(recipe)
            elif not recipe.exists() or recipe.read_text() != facts:
                raise ConfigError(
                    "OUT",
                    f"{self.work} holds pieces of other data or of another tokenizer; remove it, or give another name",
                )
            return done
        except OSError as error:
            raise ConfigError("OUT", f"cannot write there: {error}") from None

    def pieces_done(self) -> int:
        """How many pieces are in the folder."""
        try:
            return pieces_done(self.work)
        except FileNotFoundError:
            return self.source.num_pieces  # all of them, and put together

    def share(self, start: int) -> Result:
        """Make pieces, from ``start`` on, until all are made, by whomever, and the files are there."""
        made_tokens, result = 0, Result(0)

        def make(piece: int, path: Path) -> None:
            nonlocal made_tokens
            made = encode_piece(self.source, piece, self.encoding)
            made.write(path)
            made_tokens += made.ids.size

        def assemble(parts: list[Path]) -> None:
            nonlocal result
            writer = self._writer()
            skipped, _, first_skipped = add_pieces(parts, writer)
            if writer.tokens == 0:
                writer.discard()
                raise empty(writer.documents, skipped, first_skipped)
            writer.finish()
            result = Result(0, writer.tokens, writer.documents, skipped, first_skipped, np.dtype(self.dtype).name)

        make_together(
            self.work,
            self.source.num_pieces,
            make=make,
            assemble=assemble,
            finished=self.files[0].exists,
            start=start,
        )
        return replace(result, made_tokens=made_tokens)

    def _writer(self) -> TokenWriter:
        if self.format == "ds":
            return datatrove.DsWriter(self.files[0], self.dtype, self.encoding.tokenizer.name)
        return megatron.IndexedWriter(self.out, self.dtype)
