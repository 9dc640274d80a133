"""Who reads a stream on: a thread of one process, and the files it leaves for all.

Who needs which tokens is in stream.py; how a place is found again is the source's.

``X.ds`` and ``X.ds.index`` are as datatrove.py says, and grow at their ends. ``X.journal`` has a record for each piece
that was added: what it says is there is there, what stands behind it was left by somebody who was killed, and is
written anew. ``X.place-N`` is where the stream stood after N records of the journal, ``X.wanted`` up to which token
anybody needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from torchtitan.data.contents import WHOLE_BYTES
from torchtitan.data.datasets import Interrupted, Place, Skipped, StreamSource
from torchtitan.data.sharing import held_lock, take_lock
from torchtitan.data.tokens.cache import empty, kept_in
from torchtitan.data.tokens.datatrove import index_path, metadata_path, metadata_text
from torchtitan.data.tokens.encode import Encoding, encode_documents
from torchtitan.data.tokens.journal import RECORD_BYTES, Progress, damage, read_journal, record
from torchtitan.errors import ConfigError
from torchtitan.log import logger

_POLL_SECONDS = 0.04
_RETRY_SECONDS = (1, 2, 4, 8, 16, 30, 60)
"""How long is waited before a stream that broke off is read again; after the last time it has failed."""
_PIECE_CHARACTERS = 1 << 25


def read_wanted(path: Path) -> int:
    try:
        return int.from_bytes(path.read_bytes()[:8], "little")
    except FileNotFoundError:
        return 0


def lost_end(file: Path) -> ConfigError:
    stem = file.with_name(file.name.partition(".ds")[0])
    return ConfigError("data.cache_folder", f"{file} has lost its end; remove {stem}* to read the stream anew")


def remove_damaged(path: Path, id_bytes: int) -> None:
    """Take away what stands at ``path`` where it is not what its journal says, so that the stream is read anew.

    Who has it mapped keeps what he sees. ConfigError where somebody reads it on all the same.
    """
    if damage(path, id_bytes, WHOLE_BYTES) is None:
        return
    # Another one may have found it as well, and read it anew by now.
    with held_lock(path.with_suffix(".look")):
        problem = damage(path, id_bytes, WHOLE_BYTES)
        if problem is None:
            return
        lock = take_lock(path.with_suffix(".lock"), wait=False)
        if lock is None:
            raise ConfigError(
                "data.cache_folder",
                f"the stream's tokens in {path} are damaged ({problem}), and another process reads on behind them; "
                "end that one, or name another folder",
            )
        with lock:
            logger.warning(f"the stream's tokens in {path} are damaged ({problem}): reading it anew")
            # The journal first, for it vouches for the others.
            for file in (path.with_suffix(".journal"), path, index_path(path)):
                file.unlink(missing_ok=True)


class Reader:
    """Who reads a stream on, while it holds the lock: a thread."""

    def __init__(self, path: Path, source: StreamSource, encoding: Encoding, lock: IO[str]) -> None:
        self._path, self._source, self._encoding, self._lock = path, source, encoding, lock
        self._process = os.getpid()
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self._told_of_skipped = False
        self._progress, self._pieces, self._place = Progress(), 0, Place()
        # A daemon, for a thread that waits for the network must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"stream {source.name}", daemon=True)
        _READERS.add(self)
        self._thread.start()

    def is_alive(self) -> bool:
        return self.is_ours() and self._thread.is_alive()

    def is_ours(self) -> bool:
        """Whether this process started it; one that was forked later has but a picture of it."""
        return self._process == os.getpid()

    def stop(self) -> None:
        self.stopped.set()
        if self.is_alive():
            self._thread.join(5)

    def leave_to_parent(self) -> None:
        """In a process forked from the one that reads: the lock is not its own, and dies with the other."""
        self._lock.close()

    def _run(self) -> None:
        try:
            with self._lock:
                with kept_in(self._path.parent, "token files"):
                    self._recover()
                self._read()
        except BaseException as error:
            self.error = error

    def _recover(self) -> None:
        """Go on after what the journal says is there; what else there is goes."""
        path, journal = self._path, self._path.with_suffix(".journal")
        self._progress, self._pieces = read_journal(journal)
        for file, size in (
            (path, self._progress.tokens * np.dtype(self._encoding.dtype).itemsize),
            (index_path(path), self._progress.documents * 8),
            (journal, self._pieces * RECORD_BYTES),
        ):
            file.touch()
            if file.stat().st_size < size:
                raise lost_end(file)
            os.truncate(file, size)
        self._place = Place(self._progress.records)
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._place = Place(self._progress.records, json.loads(self._place_file(self._pieces).read_bytes()))

    def _place_file(self, pieces: int) -> Path:
        return self._path.with_suffix(f".place-{pieces}")

    def _read(self) -> None:
        stream: Iterator[tuple[list[str | Skipped], Place]] | None = None
        failures = 0
        while not self._progress.ended and not self.stopped.is_set():
            if self._progress.tokens >= read_wanted(self._path.with_suffix(".wanted")):
                self.stopped.wait(_POLL_SECONDS)
                continue
            try:
                stream = self._source.read_from(self._place) if stream is None else stream
                documents, place, ended = self._next_piece(stream)
            except Interrupted as error:
                if failures == len(_RETRY_SECONDS):
                    raise ConfigError(
                        "training.dataset_path",
                        f"{self._source.description}: the stream broke off {failures + 1} times after record "
                        f"{self._place.records:,} ({error}); start again when it can be reached",
                    ) from None
                pause = _RETRY_SECONDS[failures]
                logger.warning(f"{self._source.name}: the stream broke off ({error}); reading on in {pause} s")
                self.stopped.wait(pause)
                stream, failures = None, failures + 1
                continue
            failures = 0
            self._add(documents, place, ended)

    def _next_piece(
        self, stream: Iterator[tuple[list[str | Skipped], Place]]
    ) -> tuple[list[str | Skipped], Place, bool]:
        """Documents that are tokenised in one, the place after them, and whether they are the last."""
        documents: list[str | Skipped] = []
        place, characters = self._place, 0
        while len(documents) < self._source.documents_at_once and characters < _PIECE_CHARACTERS:
            found = next(stream, None)
            if found is None:
                return documents, place, True
            some, place = found
            documents += some
            characters += sum(len(document) for document in some if isinstance(document, str))
        return documents, place, False

    def _add(self, documents: list[str | Skipped], place: Place, ended: bool) -> None:
        """Write down a piece: first its content, then the place after it, and then that both are there."""
        piece, before = encode_documents(documents, self._encoding), self._progress
        if piece.skipped and not self._told_of_skipped:
            self._told_of_skipped = True
            logger.warning(f"{self._source.name}: bad records are skipped, the first: {piece.first_skipped}")
        after = Progress(
            tokens=before.tokens + len(piece.ids),
            documents=before.documents + len(piece.ends),
            records=place.records,
            skipped=before.skipped + piece.skipped,
            text_bytes=before.text_bytes + piece.text_bytes,
            ended=int(ended),
        )
        if ended and after.tokens == 0:
            raise empty(after.documents, after.skipped, piece.first_skipped)
        path, dtype = self._path, np.dtype(self._encoding.dtype)
        with kept_in(path.parent, "token files"):
            ids, ends = piece.ids.astype(dtype).tobytes(), (piece.ends + before.tokens).astype("<u8").tobytes()
            # On the disk before the journal vouches for them.
            _write_at(path, before.tokens * dtype.itemsize, ids, sync=True)
            _write_at(index_path(path), before.documents * 8, ends, sync=True)
            unfinished = path.with_suffix(".part")
            _write_at(unfinished, 0, json.dumps(place.state).encode())
            unfinished.rename(self._place_file(self._pieces + 1))
            if ended:
                text = metadata_text(self._encoding.tokenizer.name, dtype.itemsize, after.tokens)
                metadata_path(path).write_text(text)
            _write_at(path.with_suffix(".journal"), self._pieces * RECORD_BYTES, record(after, ids, ends))
            self._place_file(self._pieces).unlink(missing_ok=True)
        self._progress, self._pieces, self._place = after, self._pieces + 1, place
        if ended:
            logger.info(
                f"{self._source.name}: the stream has ended after {after.tokens:,} tokens of {after.documents:,} "
                f"documents, {after.skipped:,} bad records skipped"
            )


def _write_at(path: Path, offset: int, content: bytes, *, sync: bool = False) -> None:
    """Let ``content`` stand from byte ``offset`` of a file to its end; ``sync``: on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        written = memoryview(content)
        while written:
            count = os.pwrite(file, written, offset)
            written, offset = written[count:], offset + count
        os.ftruncate(file, offset)
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


_READERS: weakref.WeakSet[Reader] = weakref.WeakSet()


def _stop_readers() -> None:
    for reader in list(_READERS):
        reader.stop()


def _leave_to_parent() -> None:
    for reader in list(_READERS):
        reader.leave_to_parent()


atexit.register(_stop_readers)
os.register_at_fork(after_in_child=_leave_to_parent)
