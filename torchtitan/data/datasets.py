"""DATASETS: where text comes from, as documents in a fixed order and in pieces that can be read apart.

Finding and cutting files (files.py), tokenising (tokens.py) and the order of training rows (packing.py)
do not belong here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from torchtitan.data.files import (
    KEY,
    Span,
    TextFile,
    find_files,
    line_number,
    plan_pieces,
    read_lines,
    read_passage,
    refuse_other_kinds,
)
from torchtitan.data.python_docs import PythonDocs
from torchtitan.errors import ConfigError
from torchtitan.log import note_once
from torchtitan.registry import Registry

OnBadRecord = Literal["raise", "skip"]
Suffixes = Annotated[list[str], Field(min_length=1, description="endings of the files read from a folder")]
TextKey = Annotated[str, Field(description="key of the text in each record")]

_TEXT_SUFFIXES = [".txt", ".text", ".md", ".rst"]
_JSONL_SUFFIXES = [".jsonl", ".ndjson", ".json"]


@dataclass(frozen=True)
class Passage:
    """A part of a document too long to be handled in one; a whole document is a plain ``str``."""

    text: str
    opens: bool
    closes: bool


@dataclass(frozen=True)
class Skipped:
    """A record that could not be read, and why: counted and told, never passed over in silence."""

    problem: str
    file: TextFile | None = None
    offset: int = 0

    def __str__(self) -> str:
        # Lines are counted only when somebody reads the message, for it takes reading the file again.
        if self.file is None:
            return self.problem
        return f"{self.file.path}:{line_number(self.file, self.offset)}: {self.problem}"


class TextSource(Protocol):
    """What a registered builder ``(path, on_bad_record, *, options)`` returns.

    Building one looks at names and sizes only, and refuses what is not there with a ConfigError.
    """

    name: str
    description: str
    fingerprint: str
    """Equal only where the documents are; cheap: names, sizes and times, not content."""
    num_pieces: int
    """Fixed by the data alone. Pieces of a few MB let several processes share the work of reading."""

    def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
        """Documents of piece 0 <= ``piece`` < ``num_pieces``, always the same; all pieces in order are the data."""
        ...


DATASETS: Registry[Any] = Registry("dataset", home=__name__, receives=("path", "on_bad_record"))


@DATASETS.register("python_docs")
def build_python_docs(path: str | None, on_bad_record: OnBadRecord) -> TextSource:
    """English and code of the running Python: its language reference, documentation and library sources."""
    if path is not None:
        raise ConfigError(
            KEY,
            "python_docs reads the running Python and takes no path; files are for training.dataset = text or jsonl",
        )
    return PythonDocs()


@DATASETS.register("text")
def build_text(path: str | None, on_bad_record: OnBadRecord, *, suffixes: Suffixes = _TEXT_SUFFIXES) -> TextSource:
    """Text files in UTF-8, each one document: a file, a folder or a glob."""
    return _FileSource("text", _needed(path, "text"), suffixes, on_bad_record, _read_text)


@DATASETS.register("jsonl")
def build_jsonl(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    text_key: TextKey = "text",
    suffixes: Suffixes = _JSONL_SUFFIXES,
) -> TextSource:
    """JSON lines in UTF-8, each one document: a file, a folder or a glob."""

    reader = functools.partial(_read_jsonl, text_key=text_key)
    return _FileSource("jsonl", _needed(path, "jsonl"), suffixes, on_bad_record, reader, text_key)


@DATASETS.register("c4_test")
def build_c4_test(path: str | None, on_bad_record: OnBadRecord, *, text_key: TextKey = "text") -> TextSource:
    """The name in configs written for TorchTitan: ``jsonl`` with a path, ``python_docs`` without one."""
    if path is not None:
        return build_jsonl(path, on_bad_record, text_key=text_key)
    note_once("dataset c4_test has no training.dataset_path, and its text does not ship here: reading python_docs")
    return build_python_docs(None, on_bad_record)


def _needed(path: str | None, name: str) -> str:
    if path is None:
        raise ConfigError(KEY, f"the dataset {name} needs a file, a folder or a glob here")
    return path


class _FileSource:
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
        yield Skipped(_not_utf8(error), span.file, offset + error.start)
        if opens and closes:
            return
    yield text if opens and closes else Passage(text, opens, closes)


def _read_jsonl(span: Span, *, text_key: str) -> Iterator[str | Skipped]:
    for offset, line in read_lines(span):
        found: str | Skipped
        try:
            content = line.decode("utf-8-sig" if offset == 0 else "utf-8")
            if not content.strip():
                continue
            found = _text_of(json.loads(content), text_key)
        except UnicodeDecodeError as error:
            found = Skipped(_not_utf8(error), span.file, offset)
        except json.JSONDecodeError as error:
            found = Skipped(f"not JSON ({error.msg}, column {error.colno})", span.file, offset)
        except (ValueError, RecursionError) as error:
            found = Skipped(str(error), span.file, offset)
        yield found


def _text_of(record: object, text_key: str) -> str:
    """The text of a decoded JSON line, or ValueError that says what is there instead."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where an object with the key {text_key!r} was expected")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r} (there are: {', '.join(record) or 'none'}; set data.args.text_key)")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} holds a JSON {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text_key!r} holds half of a surrogate pair, which is no text") from None
    return text


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
