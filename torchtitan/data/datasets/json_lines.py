"""JSON lines: one document a line, its text under a key.

Which files there are, and how they are cut into pieces, is in files.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

from torchtitan.data.compressed import DamagedError
from torchtitan.data.datasets import DATASETS, OnBadRecord, Skipped, TextSource, needed
from torchtitan.data.datasets.running_python import build_python_docs
from torchtitan.data.datasets.text_files import Suffixes, TextKey, not_utf8, text_source
from torchtitan.data.files import Span, read_lines
from torchtitan.errors import listed
from torchtitan.log import note_once

_JSONL_SUFFIXES = [".jsonl", ".ndjson", ".json"]


@DATASETS.register("jsonl")
def build_jsonl(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    text_key: TextKey = "text",
    suffixes: Suffixes = _JSONL_SUFFIXES,
) -> TextSource:
    """JSON lines in UTF-8, compressed or not, each one document: a file, a folder or a glob."""
    reader = functools.partial(_read_jsonl, text_key=text_key)
    source = text_source("jsonl", needed(path, "jsonl"), suffixes, on_bad_record, reader, text_key)
    if on_bad_record == "raise":
        next(iter(source.read(0)), None)  # a mistyped key is told before the start, for all records will lack it
    return source


@DATASETS.register("c4_test")
def build_c4_test(path: str | None, on_bad_record: OnBadRecord, *, text_key: TextKey = "text") -> TextSource:
    """The name in configs written for TorchTitan: ``jsonl`` with a path, ``python_docs`` without one."""
    if path is not None:
        return build_jsonl(path, on_bad_record, text_key=text_key)
    note_once("dataset c4_test has no path, and its text does not ship here: reading python_docs")
    return build_python_docs(None, on_bad_record)


def _read_jsonl(span: Span, *, text_key: str) -> Iterator[str | Skipped]:
    try:
        yield from _read_lines(span, text_key)
    except DamagedError as error:
        yield Skipped(str(error), span.file)


def _read_lines(span: Span, text_key: str) -> Iterator[str | Skipped]:
    for offset, line in read_lines(span):
        found: str | Skipped
        try:
            content = line.decode("utf-8-sig" if offset == 0 else "utf-8")
            if not content.strip():
                continue
            found = _text_of(_decoded(content), text_key)
        except UnicodeDecodeError as error:
            found = Skipped(not_utf8(error), span.file, offset)
        except json.JSONDecodeError as error:
            found = Skipped(f"not JSON ({error.msg}, column {error.colno})", span.file, offset)
        except ValueError as error:
            found = Skipped(str(error), span.file, offset)
        yield found


def _decoded(content: str) -> object:
    """A line of JSON; ValueError where it is none."""
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        raise
    except ValueError:  # which Python has of one thing only
        raise ValueError("a number of thousands of digits") from None
    except RecursionError:
        raise ValueError("lists or objects within each other, too deep to read") from None


def _text_of(record: object, text_key: str) -> str:
    """The text of a decoded JSON line, or ValueError that says what is there instead."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where an object with the key {text_key!r} was expected")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r} (there are: {listed(record)}; set data.args.text_key)")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} holds a JSON {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text_key!r} holds half of a surrogate pair, which is no text") from None
    return text
