"""Tokens of a stream, which grow while training goes on: one file, read on by one process for all that need it.

What is read on, and how its place is found again, is the source's; in which order rows are cut from it, rows/'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.datasets import StreamSource
from torchtitan.data.sharing import take_lock
from torchtitan.data.tokens.cache import cached_file, kept_in
from torchtitan.data.tokens.datatrove import EndedDocuments, index_path
from torchtitan.data.tokens.encode import Encoding
from torchtitan.data.tokens.journal import Progress, read_journal
from torchtitan.data.tokens.store import circle_window, map_array
from torchtitan.data.tokens.stream_reader import Reader, lost_end, read_wanted, remove_damaged
from torchtitan.errors import ConfigError
from torchtitan.log import logger

_POLL_SECONDS = 0.02
_TOLD_SECONDS = 30.0
_ALL = 1 << 62


def open_stream(source: StreamSource, encoding: Encoding, *, cache_folder: str = "") -> StreamTokens:
    """The tokens of ``source``, of which the first are there; the others come when they are needed.

    They stay in ``cache_folder`` (empty: the user's), 2 or 4 bytes each, so that a restart reads no text twice; where
    the newest 256 MiB of them are not what was written, the stream is read anew. Raises
    ConfigError for a stream that cannot be read or holds nothing, and for a folder that cannot be used.
    """
    path, recipe = cached_file(source, encoding, cache_folder)
    with kept_in(path.parent, "token files"):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_damaged(path, np.dtype(encoding.dtype).itemsize)
    tokens = StreamTokens(path, source, encoding, hashlib.sha256(json.dumps(recipe).encode()).hexdigest())
    tokens.window(0, 1)
    tokens.rest()  # loader workers, which are started next, shall read on
    there = tokens.progress
    logger.info(
        f"{source.name}: a stream ({source.description}), of which {there.tokens:,} tokens of {there.documents:,} "
        f"documents are in {path}"
    )
    if there.skipped:
        logger.warning(f"{source.name}: {there.skipped:,} bad records were skipped so far")
    return tokens


class StreamTokens:
    """Tokens of a stream, as the others but for their number, which is known when the stream has ended.

    Where they lie is ``path``. A window that is not there yet is waited for, while the first process that needs it
    reads the stream on in a thread; it keeps on for all, and another one goes on when it dies.
    """

    def __init__(self, path: Path, source: StreamSource, encoding: Encoding, fingerprint: str) -> None:
        self.path, self.fingerprint, self.shuffle_rows = path, fingerprint, source.shuffle_rows
        self.progress = Progress()
        self._source, self._encoding = source, encoding
        self._ids: npt.NDArray[Any] = np.empty(0, encoding.dtype)
        self.documents = EndedDocuments(np.empty(0, "<u8"), fingerprint)
        """Those that are there; others take its place when more come."""
        self._asked = 0
        self._reader: Reader | None = None

    def __reduce__(self) -> tuple[type[StreamTokens], tuple[Any, ...]]:
        return StreamTokens, (self.path, self._source, self._encoding, self.fingerprint)

    @property
    def ended(self) -> bool:
        self._look()
        return bool(self.progress.ended)

    def __len__(self) -> int:
        if not self.ended:
            raise ConfigError(
                "data.args.streaming",
                f"how many tokens {self._source.name} has is known when all of it was read; "
                "this asks for it before, so set data.args.streaming = false",
            )
        return self.progress.tokens

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        stop = start + length
        if stop > self.progress.tokens and not self.progress.ended:
            self._wait_for(stop)
        if stop <= self.progress.tokens:
            return self._ids[start:stop].astype(np.int64)
        return circle_window(self._ids, start, length)

    def wait_for(self, tokens: int | None) -> int:
        """Wait until so many tokens (None: all) of the stream are there; returns how many are, no more than that."""
        wanted = _ALL if tokens is None else tokens
        self._wait_for(wanted)
        return min(wanted, self.progress.tokens)

    def want(self, stop: int) -> None:
        """Let the tokens before ``stop`` be read meanwhile; waits for nothing."""
        if stop <= max(self._asked, self.progress.tokens) or self.progress.ended:
            return
        self._ask(stop)
        self._asked = stop
        # What went wrong is told to who has to wait.
        if self._reader is None or self._reader.error is None:
            self._read_on()

    def rest(self) -> None:
        """Leave reading on to others."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def _wait_for(self, stop: int) -> None:
        began = told = time.monotonic()
        looks = 0
        while True:
            self._look()
            if stop <= self.progress.tokens or self.progress.ended:
                return
            reader = self._reader
            if reader is not None and reader.error is not None and reader.is_ours():
                self._reader = None  # who asks again tries again
                raise reader.error
            if looks % 25 == 0:  # a few times a second, for others may overwrite it, and the one who reads may die
                self._ask(stop)
                self._read_on()
            if time.monotonic() - told > _TOLD_SECONDS:
                told = time.monotonic()
                logger.info(
                    f"{self._source.name}: waiting for its tokens since {told - began:.0f} s: "
                    f"{self.progress.tokens:,} are there, {'all' if stop == _ALL else f'{stop:,}'} are needed"
                )
            time.sleep(_POLL_SECONDS)
            looks += 1

    def _look(self) -> None:
        """See what is there by now."""
        if self.progress.ended:
            return
        progress, _ = read_journal(self.path.with_suffix(".journal"))
        if progress.tokens > len(self._ids):
            try:
                self._ids = map_array(self.path, self._encoding.dtype, count=progress.tokens)
                ends = map_array(index_path(self.path), "<u8", count=progress.documents)
                self.documents = EndedDocuments(ends, self.fingerprint)
            except (ValueError, FileNotFoundError):
                raise lost_end(self.path) from None
        self.progress = progress

    def _ask(self, stop: int) -> None:
        with kept_in(self.path.parent, "token files"):
            wanted = self.path.with_suffix(".wanted")
            if stop > read_wanted(wanted):
                file = os.open(wanted, os.O_WRONLY | os.O_CREAT, 0o666)
                try:
                    os.pwrite(file, stop.to_bytes(8, "little"), 0)
                finally:
                    os.close(file)

    def _read_on(self) -> None:
        """Be the one who reads the stream, if nobody is."""
        if self._reader is not None and self._reader.is_alive():
            return
        with kept_in(self.path.parent, "token files"):
            lock = take_lock(self.path.with_suffix(".lock"), wait=False)
        if lock is not None:
            self._reader = Reader(self.path, self._source, self._encoding, lock)
            weakref.finalize(self, self._reader.stopped.set)
