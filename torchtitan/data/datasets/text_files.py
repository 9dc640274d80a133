"""Text that lies in files: what the files of a kind have in common, and plain text.

Which files there are, and how they are cut into pieces, is in files.py.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import Field

from torchtitan.data.compressed import ENDINGS, DamagedError
from torchtitan.data.contents import sampled_together
from torchtitan.data.datasets import DATASETS, OnBadRecord, Passage, Skipped, TextSource, needed, refused
from torchtitan.data.files import (
    KEY,
    Span,
    TextFile,
    cannot_read,
    find_compressed,
    find_files,
    plan_pieces,
    read_passages,
    refuse_changed,
    refuse_early,
    refuse_other_kinds,
)
from torchtitan.errors import ConfigError

Suffixes = Annotated[
    list[str], Field(min_length=1, description="endings of the files read from a folder, compressed ones as well")
]
TextKey = Annotated[str, Field(description="key of the text in each record")]

_TEXT_SUFFIXES = [".txt", ".text", ".md", ".rst"]


@DATASETS.register("text")
def build_text(path: str | None, on_bad_record: OnBadRecord, *, suffixes: Suffixes = _TEXT_SUFFIXES) -> TextSource:
    """Text files in UTF-8, compressed or not, each one document: a file, a folder or a glob."""
    return text_source("text", needed(path, "text"), suffixes, on_bad_record, _read_text)


def text_source(
    name: str,
    path: str,
    suffixes: list[str],
    on_bad_record: OnBadRecord,
    reader: Callable[[Span], Iterator[str | Passage | Skipped]],
    *options: str,
) -> FileSource:
    """A source of files of text, plain or compressed; ``options`` are what else their documents depend on."""
    files = find_files(path, suffixes, ENDINGS)
    pieces = plan_pieces(files, find_compressed(files))
    source = FileSource(name, path, files, pieces, on_bad_record, reader, refuse_other_kinds, *options)
    refuse_early(files, refuse_other_kinds)
    return source


class FileSource:
    """Files cut into ``pieces``; ``reader`` turns one span of a file into documents, ``refuse`` says no to files of
    another kind."""

    def __init__(
        self,
        name: str,
        path: str,
        files: list[TextFile],
        pieces: list[list[Span]],
        on_bad_record: OnBadRecord,
        reader: Callable[[Span], Iterator[str | Passage | Skipped]],
        refuse: Callable[[TextFile], None],
        *options: str,
    ) -> None:
        self.name = name
        self.description = f"{len(files)} file(s) with {sum(f.size for f in files) / 1e6:.1f} MB at {path}"
        self.num_pieces = len(pieces)
        self._files, self._facts = files, (name, options, on_bad_record)
        self._pieces, self._on_bad_record, self._reader, self._refuse = pieces, on_bad_record, reader, refuse

    @functools.cached_property
    def fingerprint(self) -> str:
        try:
            content = sampled_together([file.path for file in self._files])
        except OSError as error:
            raise cannot_read(error) from None
        facts = (*self._facts, [(f.name, f.size, f.mtime_ns) for f in self._files], content)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
        """The documents of a piece; ConfigError as well where a file is not, after it was read, what it was when the
        source was built."""
        for span in self._pieces[piece]:
            self._refuse(span.file)
            try:
                for found in self._reader(span):
                    if isinstance(found, Skipped) and self._on_bad_record == "raise":
                        refuse_changed([span.file])  # of which a bad record is no wonder
                        raise refused(found)
                    yield found
                refuse_changed([span.file])
            except OSError as error:
                raise ConfigError(KEY, f"cannot read {span.file.path}: {error.strerror}") from None


def _read_text(span: Span) -> Iterator[str | Passage | Skipped]:
    """A file, or the part of it in ``span``. Where a part is skipped, its document still opens and closes."""
    opened = closed = False
    try:
        for offset, content, closed in read_passages(span):
            opens = span.start == 0 and not opened
            text = ""
            try:
                text = content.decode("utf-8-sig" if opens else "utf-8")
            except UnicodeDecodeError as error:
                yield Skipped(not_utf8(error), span.file, offset + error.start)
                if opens and closed:
                    return
            yield text if opens and closed else Passage(text, opens, closed)
            opened = True
    except DamagedError as error:
        yield Skipped(str(error), span.file)
        if opened:
            yield Passage("", False, True)


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
