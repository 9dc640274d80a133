"""A column of text in Arrow's tables: whether there is one, and its documents row by row.

Which files or data sets hold the table does not belong here. pyarrow is imported where it is needed only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan.errors import brief, listed

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 512
# What the ids of a dictionary stand for is asked of its values.
_TEXTS = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")


def column_problem(schema: pa.Schema, text_key: str) -> str | None:
    """Why ``text_key`` is no column of text in ``schema``, None where it is one."""
    if text_key not in schema.names:
        return f"no column {text_key!r} (there are: {listed(schema.names)}; set data.args.text_key)"
    kind = schema.field(schema.names.index(text_key)).type
    if not _is_text(kind):
        return f"column {text_key!r} holds {brief(str(kind))}, not text"
    return None


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(getattr(pa.types, test)(kind) for test in _TEXTS)


def texts(column: Any) -> Iterator[str | ValueError]:
    """The text of each row of an array of text; ValueError, with what is wrong, in place of one that is none."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        # Arrow does not check what it reads, but Python does.
        values = column.to_pylist()
    except UnicodeDecodeError:
        wide = pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type)
        values = column.cast(pa.large_binary() if wide else pa.binary()).to_pylist()
    for value in values:
        if value is None:
            yield ValueError("null, not text")
        elif isinstance(value, bytes):
            try:
                yield value.decode()
            except UnicodeDecodeError as error:
                yield ValueError(f"not UTF-8 (byte 0x{value[error.start]:02x})")
        else:
            yield value
