"""Parquet: one document a row, its text in a column.

What a column of text is, is in columns.py. Row groups are to a file what lines are to text: one that begins inside a
span is read with it, so that pieces follow from the sizes of files, and footers are read when their turn comes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from torchtitan.data.columns import ROWS_AT_ONCE, column_problem, texts
from torchtitan.data.datasets import DATASETS, OnBadRecord, Skipped, TextSource, needed, refused
from torchtitan.data.datasets.text_files import FileSource
from torchtitan.data.files import KEY, Span, TextFile, cannot_read, find_files, kind_of, plan_pieces, refuse_early
from torchtitan.errors import ConfigError, one_line

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_SUFFIXES = [".parquet", ".pq"]
_MAGIC = b"PAR1"


@DATASETS.register("parquet")
def build_parquet(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    text_key: Annotated[str, Field(description="column of the text")] = "text",
    suffixes: Annotated[list[str], Field(min_length=1, description="endings of the files of a folder")] = _SUFFIXES,
) -> TextSource:
    """Parquet files with a column of text, each row one document: a file, a folder or a glob."""
    given = needed(path, "parquet")
    files = find_files(given, suffixes)
    reader = functools.partial(_read_parquet, text_key=text_key)
    source = FileSource(
        "parquet", given, files, plan_pieces(files), on_bad_record, reader, _refuse_other_kinds, text_key
    )
    refuse_early(files, _refuse_other_kinds)
    if on_bad_record == "raise":
        # A mistyped column is told before the start, for it will be mistyped in all files.
        _check_first(files[0], text_key)
    return source


def _check_first(file: TextFile, text_key: str) -> None:
    try:
        with _opened(file) as content:
            problem = column_problem(content.schema_arrow, text_key)
    except ConfigError as error:
        raise refused(error.problem) from None
    if problem:
        raise ConfigError(KEY, f"{file.path}: {problem}")


def _refuse_other_kinds(file: TextFile) -> None:
    try:
        with open(file.path, "rb") as stream:
            head = stream.read(512)
    except OSError as error:
        raise cannot_read(error) from None
    if head and not head.startswith(_MAGIC):
        kind, remedy = kind_of(head) or ("no parquet file", "set training.dataset = jsonl or text if it is text")
        raise ConfigError(KEY, f"{file.path} is {kind}; this dataset reads parquet: {remedy}")


def _opened(file: TextFile) -> pq.ParquetFile:
    """ConfigError where the file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file.path, memory_map=False, buffer_size=1 << 20, pre_buffer=False)
    except pa.ArrowException as error:
        raise ConfigError(
            KEY, f"{file.path}: a parquet file that is damaged or truncated ({one_line(error)})"
        ) from None


def _read_parquet(span: Span, *, text_key: str) -> Iterator[str | Skipped]:
    file = span.file
    try:
        content = _opened(file)
    except ConfigError as error:
        if span.start == 0:  # told once, whatever the number of pieces
            yield Skipped(error.problem)
        return
    with content:
        problem, row = column_problem(content.schema_arrow, text_key), 0
        for group in range(content.num_row_groups):
            rows = content.metadata.row_group(group)
            if span.start <= _begin(rows) < span.stop:
                if problem:
                    yield from (Skipped(f"row {row + k + 1}: {problem}", file) for k in range(rows.num_rows))
                else:
                    yield from _read_group(content, group, row, file, text_key)
            row += rows.num_rows


def _begin(rows: Any) -> int:
    """Byte at which a row group begins."""
    if rows.num_columns == 0:
        return 0
    first = rows.column(0)
    dictionary = first.dictionary_page_offset
    return first.data_page_offset if dictionary is None else min(dictionary, first.data_page_offset)


def _read_group(
    content: pq.ParquetFile, group: int, row: int, file: TextFile, text_key: str
) -> Iterator[str | Skipped]:
    """Documents of a row group, of which ``row`` rows of the file come before."""
    import pyarrow as pa

    end = row + content.metadata.row_group(group).num_rows
    try:
        # Without threads: the processes that share the work are as many as there are cores.
        for batch in content.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[text_key], use_threads=False):
            for found in texts(batch.column(0)):
                row += 1
                yield found if isinstance(found, str) else Skipped(f"row {row}: {found}", file)
    except (pa.ArrowException, OSError) as error:
        problem = f"row group {group} is damaged ({one_line(error)})"
        yield from (Skipped(f"row {k + 1}: {problem}", file) for k in range(row, end))
