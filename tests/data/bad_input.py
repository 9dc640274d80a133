"""What is wrong with the text of data sets, and what is said of it: a table for tests, and for whoever shows it."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan.data.datasets import DATASETS
from torchtitan.data.tokenizers.utf8 import BytesTokenizer
from torchtitan.data.tokens.cache import open_tokens
from torchtitan.data.tokens.encode import Encoding
from torchtitan.errors import ConfigError


def _parquet(path: Path, texts: Any, column: str = "text") -> None:
    pq.write_table(pa.table({column: texts}), path)


def _unchecked(*values: bytes) -> pa.Array:
    buffers = pa.array(values).buffers()
    return pa.StringArray.from_buffers(len(values), buffers[1], buffers[2])


def _lines(path: Path, *lines: bytes) -> None:
    path.write_bytes(b"\n".join((b'{"text": "good"}', *lines, b'{"text": "last"}')) + b"\n")


@dataclass(frozen=True)
class Bad:
    """``make`` writes it into a folder; what is said of it holds ``says``. ``skipped`` records are skipped where that
    is wanted and ``left`` stay, None where it is refused all the same."""

    what: str
    dataset: str
    make: Callable[[Path], Any]
    says: str
    skipped: int | None = 1
    left: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "."


TABLE = [
    Bad("invalid UTF-8", "text", lambda f: (f / "a.txt").write_bytes(b"x\ny \xff"), "a.txt:2: not UTF-8", left=0),
    Bad("invalid UTF-8", "jsonl", lambda f: _lines(f / "a.jsonl", b'{"text": "\xff"}'), "a.jsonl:2: not UTF-8"),
    Bad(
        "invalid UTF-8",
        "parquet",
        lambda f: _parquet(f / "a.parquet", _unchecked(b"x", b"\xff", b"y")),
        "a.parquet: row 2: not UTF-8",
    ),
    Bad("no JSON", "jsonl", lambda f: _lines(f / "a.jsonl", b"{nope"), "a.jsonl:2: not JSON"),
    Bad(
        "no JSON, compressed",
        "jsonl",
        lambda f: (_lines(f / "a", b"{"), (f / "a.jsonl.gz").write_bytes(gzip.compress((f / "a").read_bytes()))),
        "a.jsonl.gz:2: not JSON",
    ),
    Bad("mixed keys", "jsonl", lambda f: _lines(f / "a.jsonl", b'{"body": "x"}'), "a.jsonl:2: no key 'text' (there"),
    Bad("another type", "jsonl", lambda f: _lines(f / "a.jsonl", b'{"text": 3}'), "a.jsonl:2: 'text' holds a JSON int"),
    Bad("null", "parquet", lambda f: _parquet(f / "a.parquet", ["x", None, "y"]), "a.parquet: row 2: null"),
    Bad(
        "mixed columns",
        "parquet",
        lambda f: (_parquet(f / "a.parquet", ["x", "y"]), _parquet(f / "b.parquet", ["z"], "body")),
        "b.parquet: row 1: no column 'text' (there are: body",
    ),
    Bad("no such column", "parquet", lambda f: _parquet(f / "a.parquet", ["x"], "body"), "no column 'text'", 1, 0),
    Bad(
        "truncated",
        "jsonl",
        lambda f: (
            (f / "a.jsonl").write_bytes(b'{"text": "x"}\n'),
            (f / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "y"}\n{"text": "z"}\n')[:-4]),
        ),
        "b.jsonl.gz: a gzip archive that ends before its end: it is truncated",
        left=3,
    ),
    Bad(
        "truncated",
        "parquet",
        lambda f: (_parquet(f / "a.parquet", ["x"]), _cut(f / "a.parquet"), _parquet(f / "b.parquet", ["x", "y"])),
        "a.parquet: a parquet file that is damaged or truncated",
    ),
    Bad("parquet as text", "text", lambda f: _parquet(f / "a.txt", ["x"]), "a.txt is a parquet file", None),
    Bad("text as parquet", "parquet", lambda f: _lines(f / "a.parquet"), "a.parquet is no parquet file", None),
    Bad("an archive of files", "text", lambda f: (f / "a.txt").write_bytes(b"PK\x03\x04"), "a.txt is a zip", None),
    Bad("a glob of nothing", "jsonl", lambda f: None, "no file, folder or glob matches", None, path="*.jsonl"),
    Bad("a folder of others", "jsonl", lambda f: (f / "a.csv").touch(), "(found: 1 with .csv)", None),
]
"""Not bad and not here: documents without text, and documents of any length."""


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def tokenise(bad: Bad, folder: Path, on_bad_record: str) -> tuple[int, int]:
    """Documents and skipped records of ``bad`` in ``folder``; ConfigError as a run would tell it."""
    path = str(folder if bad.path == "." else folder / bad.path)
    source = DATASETS.bind(bad.dataset, bad.options, key="data.args")(path, on_bad_record)
    tokens = open_tokens(source, Encoding(BytesTokenizer(), None, 256), cache_folder=str(folder / "cache"))
    return tokens.header.documents, tokens.header.skipped


def message(bad: Bad, folder: Path) -> str:
    """What is said of it where nothing is to be skipped."""
    bad.make(folder)
    try:
        tokenise(bad, folder, "raise")
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"nothing is said of {bad.what}")
