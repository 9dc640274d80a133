"""Text that lies in files: what the files of a kind have in common, and plain text.

Which files there are, and how they are cut into pieces, is in files.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import Field

from torchtitan.data.datasets import DATASETS, OnBadRecord, Passage, Skipped, TextSource, needed
from torchtitan.data.files import KEY, Span, find_files, plan_pieces, read_passage, refuse_other_kinds
from torchtitan.errors import ConfigError

Suffixes = Annotated[list[str], Field(min_length=1, description="endings of the files read from a folder")]
TextKey = Annotated[str, Field(description="key of the text in each record")]

_TEXT_SUFFIXES = [".txt", ".text", ".md", ".rst"]


@DATASETS.register("text")
def build_text(path: str | None, on_bad_record: OnBadRecord, *, suffixes: Suffixes = _TEXT_SUFFIXES) -> TextSource:
    """Text files in UTF-8, each one document: a file, a folder or a glob."""
    return FileSource("text", needed(path, "text"), suffixes, on_bad_record, _read_text)


class FileSource:
    """Files cut into pieces; ``reader`` turns one span of a file into documents."""

    def __init__(
        self,
        name: str,
        path: str,
        suffixes: list[str],
        on_bad_record: OnBadRecord,
        reader: Callable[[Span], Iterator[str | Passage | Skipped]],
        *options: str,
    ) -> None:
        files = find_files(path, suffixes)
        self.name = name
        self.description = f"{len(files)} file(s) with {sum(f.size for f in files) / 1e6:.1f} MB at {path}"
        facts = (name, options, on_bad_record, [(f.name, f.size, f.mtime_ns) for f in files])
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
        self._pieces = plan_pieces(files)
        self.num_pieces = len(self._pieces)
        self._on_bad_record, self._reader = on_bad_record, reader

    def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
        for span in self._pieces[piece]:
            refuse_other_kinds(span.file)
            try:
                for found in self._reader(span):
                    if isinstance(found, Skipped) and self._on_bad_record == "raise":
                        raise ConfigError(KEY, f"{found}; mend it, or set data.on_bad_record = skip")
                    yield found
            except OSError as error:
                raise ConfigError(KEY, f"cannot read {span.file.path}: {error.strerror}") from None


def _read_text(span: Span) -> Iterator[str | Passage | Skipped]:
    """A file, or the part of it in ``span``. Where a part is skipped, its document still opens and closes."""
    offset, content = read_passage(span)
    opens, closes = span.start == 0, span.stop == span.file.size
    text = ""
    try:
        text = content.decode("utf-8-sig" if opens else "utf-8")
    except UnicodeDecodeError as error:
        yield Skipped(not_utf8(error), span.file, offset + error.start)
        if opens and closes:
            return
    yield text if opens and closes else Passage(text, opens, closes)


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
