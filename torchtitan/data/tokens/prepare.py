"""Data made into token files: text by several processes, which may be killed and go on; a stream, or tokens, by one.

What the files look like is in the module of their format; the command, with its bar and its words, in
``commands/prepare.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchtitan.data.datasets import StreamSource, TextSource, TokenSource
from torchtitan.data.sharing import make_together, pieces_done
from torchtitan.data.tokens import datatrove, megatron
from torchtitan.data.tokens.cache import add_pieces, empty
from torchtitan.data.tokens.encode import Encoding, encode_piece
from torchtitan.data.tokens.store import Documents, Tokens, TokenWriter
from torchtitan.data.tokens.stream import open_stream
from torchtitan.errors import ConfigError

Format = Literal["ds", "megatron"]
_TOKENS_AT_ONCE, _DOCUMENTS_AT_ONCE = 1 << 22, 1 << 16
_ANY_ID = 1 << 31
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
class Target:
    """Files that are called ``out`` and the endings of ``format``."""

    out: Path
    format: Format

    @property
    def files(self) -> list[Path]:
        """What is written; the first appears last."""
        return [self.out.with_name(self.out.name + ending) for ending in _ENDINGS[self.format]]

    @property
    def work(self) -> Path:
        """The folder of what is done, as long as not all is."""
        return self.out.with_name(self.out.name + ".work")

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Make the folder of what is done, or go on in it. ConfigError where files are in the way, or what was done
        there is of other ``facts``."""
        for file in self.files:
            if file.exists():
                raise ConfigError("OUT", f"{file} is there already; remove it, or give another name")
        recipe, text = self.work / "recipe.json", json.dumps(facts)
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            if not pieces_done(self.work) and not any(self.work.glob("*.journal")):
                recipe.with_suffix(".part").write_text(text)
                recipe.with_suffix(".part").rename(recipe)
            elif not recipe.exists() or recipe.read_text() != text:
                raise ConfigError(
                    "OUT",
                    f"{self.work} holds pieces of other data or of another tokenizer; remove it, or give another name",
                )
        except OSError as error:
            raise ConfigError("OUT", f"cannot write there: {error}") from None

    def write(self, limit: int, tokenizer: str, fill: Callable[[TokenWriter], tuple[int, str]]) -> Result:
        """Let ``fill`` write ids below ``limit``, and put the files in their place; it returns how many records were
        skipped, and the first. ConfigError where there is no token."""
        if self.format == "ds":
            dtype = datatrove.id_dtype(limit)
            writer: TokenWriter = datatrove.DsWriter(self.files[0], dtype, tokenizer)
        else:
            dtype = megatron.id_dtype(limit)
            writer = megatron.IndexedWriter(self.out, dtype)
        skipped, first_skipped = fill(writer)
        if writer.tokens == 0:
            writer.discard()
            raise empty(writer.documents, skipped, first_skipped)
        writer.finish()
        return Result(0, writer.tokens, writer.documents, skipped, first_skipped, np.dtype(dtype).name)


@dataclass(frozen=True)
class Preparation:
    """Text of ``source`` as tokens in files."""

    source: TextSource
    encoding: Encoding
    target: Target

    def begin(self) -> int:
        """Make the folder of pieces, or go on in it; how many are there. ConfigError as ``Target.begin``."""
        facts = {"source": self.source.fingerprint, "pieces": self.source.num_pieces, **self.encoding.facts()}
        self.target.begin(facts)
        return self.pieces_done()

    def pieces_done(self) -> int:
        """How many pieces are in the folder."""
        try:
            return pieces_done(self.target.work)
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

            def fill(writer: TokenWriter) -> tuple[int, str]:
                skipped, _, first_skipped = add_pieces(parts, writer)
                return skipped, first_skipped

            result = self.target.write(self.encoding.limit, self.encoding.tokenizer.name, fill)

        make_together(
            self.target.work,
            self.source.num_pieces,
            make=make,
            assemble=assemble,
            finished=self.target.files[0].exists,
            start=start,
        )
        return replace(result, made_tokens=made_tokens)


def prepare_stream(source: StreamSource, encoding: Encoding, target: Target, progress: Callable[[int], None]) -> Result:
    """All documents of a stream as tokens in files; ``progress`` hears how many are there. After a kill it goes on
    with what was read. ConfigError as ``Target.begin`` and ``open_stream``."""
    target.begin({"stream": source.fingerprint, **encoding.facts()})
    tokens = open_stream(source, encoding, cache_folder=str(target.work))
    while not tokens.ended:
        progress(tokens.progress.documents)
        tokens.wait_for(tokens.progress.tokens + 1)
    tokens.rest()
    there = tokens.progress

    def fill(writer: TokenWriter) -> tuple[int, str]:
        _copy(tokens, tokens.documents, writer)
        return there.skipped, ""  # which one was first, the reader has told

    result = target.write(encoding.limit, encoding.tokenizer.name, fill)
    shutil.rmtree(target.work)
    return replace(result, made_tokens=there.tokens)


def prepare_tokens(source: TokenSource, target: Target) -> Result:
    """Tokens in files of another format, or several files as one. ConfigError where nothing says where documents begin,
    and as ``Target.begin``."""
    tokens = source.open(_ANY_ID)
    if tokens.documents is None:
        raise ConfigError("training.dataset_path", "no index says where documents begin, and OUT has to say it")
    documents = tokens.documents
    target.begin({"tokens": tokens.fingerprint, "documents": documents.fingerprint})
    limit = 1 + max(int(tokens.window(start, length).max()) for start, length in _steps(0, len(tokens)))

    def fill(writer: TokenWriter) -> tuple[int, str]:
        _copy(tokens, documents, writer)
        return 0, ""

    result = target.write(limit, "unknown", fill)
    shutil.rmtree(target.work)
    return replace(result, made_tokens=result.tokens)


def _copy(tokens: Tokens, documents: Documents, writer: TokenWriter) -> None:
    """All of ``tokens``, in steps of bounded memory."""
    for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        last = min(first + _DOCUMENTS_AT_ONCE, len(documents))
        starts = documents.starts(first, min(last + 1, len(documents)))
        ends = starts[1:] if last < len(documents) else np.append(starts[1:], len(tokens))
        begin, done = int(starts[0]), 0
        for start, length in _steps(begin, int(ends[-1])):
            of_step = int(np.searchsorted(ends, start + length, side="right"))
            writer.add(tokens.window(start, length), ends[done:of_step] - start)
            done = of_step
        if done < len(ends):  # none of them has a token
            writer.add(np.empty(0, np.int64), ends[done:] - begin)


def _steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """``start`` to ``stop`` as beginnings and lengths."""
    return ((begin, min(_TOKENS_AT_ONCE, stop - begin)) for begin in range(start, stop, _TOKENS_AT_ONCE))
