"""Data made into token files: text by several processes, which may be killed and go on; a stream, or tokens, by one.

What the files look like is in the module of their format; the command, with its bar and its words, in
``commands/prepare.py``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchtitan.data.datasets import StreamSource, TextSource, TokenSource
from torchtitan.data.sharing import OtherWorkError, join_work, make_together, pieces_done
from torchtitan.data.tokens import datatrove, megatron
from torchtitan.data.tokens.cache import add_pieces, empty, kept_in
from torchtitan.data.tokens.encode import Encoding, encode_piece
from torchtitan.data.tokens.journal import read_journal
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
        """The folder of what is done, as long as not all is; of this format, for another may be made at once."""
        return self.out.with_name(f"{self.out.name}.{self.format}.work")

    @property
    def whole(self) -> bool:
        """Whether the files are there: the one that appears last."""
        return self.files[0].exists()

    @contextlib.contextmanager
    def begun(self, facts: Mapping[str, Any], *, pieces: int = 0, alone: bool = False) -> Iterator[None]:
        """Within, the files are made of ``facts``, in ``pieces`` if that is not 0, ``alone`` by this process only.

        ConfigError where files are in the way that are not left over from making these, where what is done is of other
        facts, and where others are making it of them.
        """
        with self._usable():
            if not self._left_over(facts):
                for file in self.files:
                    if file.exists():
                        raise ConfigError("OUT", f"{file} is there already; remove it, or give another name")
            elif self.whole and not self._all_done(pieces):
                raise ConfigError("OUT", f"{self.files[0]} is there already; remove it, or give another name")
        with self.joined(facts, alone=alone):
            yield
            if self.whole:
                shutil.rmtree(self.work, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.work.rmdir()  # some network file systems keep in it what was held open

    @contextlib.contextmanager
    def joined(self, facts: Mapping[str, Any], *, alone: bool = False) -> Iterator[None]:
        """As ``begun``, for a process that takes part in what was begun, and perhaps ended meanwhile."""
        try:
            with self._usable():
                part = join_work(self.work, _told(facts), begun=self._something_done, alone=alone)
        except OtherWorkError as error:
            raise ConfigError("OUT", f"{self.work} {error}, or give another name") from None
        with part:
            yield

    def _usable(self) -> contextlib.AbstractContextManager[None]:
        return kept_in(self.out.parent, "token files")

    def _left_over(self, facts: Mapping[str, Any]) -> bool:
        try:
            return (self.work / "recipe.json").read_bytes() == _told(facts)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _something_done(self) -> bool:
        return bool(pieces_done(self.work)) or any(self.work.glob("*.journal"))

    def _all_done(self, pieces: int) -> bool:
        if pieces:
            return pieces_done(self.work) == pieces
        return any(read_journal(path)[0].ended for path in self.work.glob("*.journal"))

    def write(self, limit: int, tokenizer: str, fill: Callable[[TokenWriter], tuple[int, str]]) -> Result:
        """Let ``fill`` write ids below ``limit``, and put the files in their place; it returns how many records were
        skipped, and the first. ConfigError where there is no token, and where they cannot be written."""
        with self._usable(), contextlib.ExitStack() as unless_whole:
            if self.format == "ds":
                dtype = datatrove.id_dtype(limit)
                writer: TokenWriter = datatrove.DsWriter(self.files[0], dtype, tokenizer)
            else:
                dtype = megatron.id_dtype(limit)
                writer = megatron.IndexedWriter(self.out, dtype)
            unless_whole.callback(writer.discard)
            skipped, first_skipped = fill(writer)
            if writer.tokens == 0:
                raise empty(writer.documents, skipped, first_skipped)
            writer.finish()
            unless_whole.pop_all()
        return Result(0, writer.tokens, writer.documents, skipped, first_skipped, np.dtype(dtype).name)


@dataclass(frozen=True)
class Preparation:
    """Text of ``source`` as tokens in files."""

    source: TextSource
    encoding: Encoding
    target: Target

    def begun(self) -> contextlib.AbstractContextManager[None]:
        """Within, any number of processes ``share`` it. ConfigError as ``Target.begun``."""
        return self.target.begun(self._facts(), pieces=self.source.num_pieces)

    def _facts(self) -> dict[str, Any]:
        return {"source": self.source.fingerprint, "pieces": self.source.num_pieces, **self.encoding.facts()}

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

        with self.target.joined(self._facts()), kept_in(self.target.work, "what is done"):
            make_together(
                self.target.work,
                self.source.num_pieces,
                make=make,
                assemble=assemble,
                finished=lambda: self.target.whole,
                start=start,
            )
        return replace(result, made_tokens=made_tokens)


def prepare_stream(source: StreamSource, encoding: Encoding, target: Target, progress: Callable[[int], None]) -> Result:
    """All documents of a stream as tokens in files; ``progress`` hears how many are there. After a kill it goes on
    with what was read. ConfigError as ``Target.begun`` and ``open_stream``."""
    with target.begun({"stream": source.fingerprint, **encoding.facts()}, alone=True):
        if target.whole:
            return Result(0)
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
    return replace(result, made_tokens=there.tokens)


def prepare_tokens(source: TokenSource, target: Target) -> Result:
    """Tokens in files of another format, or several files as one. ConfigError where nothing says where documents begin,
    and as ``Target.begun``."""
    tokens = source.open(_ANY_ID)
    if tokens.documents is None:
        raise ConfigError("training.dataset_path", "no index says where documents begin, and OUT has to say it")
    documents = tokens.documents
    with target.begun({"tokens": tokens.fingerprint, "documents": documents.fingerprint}, alone=True):
        limit = 1 + max(int(tokens.window(start, length).max()) for start, length in _steps(0, len(tokens)))

        def fill(writer: TokenWriter) -> tuple[int, str]:
            _copy(tokens, documents, writer)
            return 0, ""

        result = target.write(limit, "unknown", fill)
    return replace(result, made_tokens=result.tokens)


def _told(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts).encode()


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
