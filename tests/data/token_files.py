"""Token files for tests: written, opened, and spoiled, with what is said of the spoiled ones."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.datasets import DATASETS, TokenSource, is_tokens
from torchtitan.data.tokens.datatrove import DsWriter
from torchtitan.data.tokens.megatron import IndexedWriter
from torchtitan.data.tokens.store import Tokens
from torchtitan.errors import ConfigError

DOCUMENTS = [[5, 6, 7], [8, 9]]


def write(writer: Any, documents: list[list[int]]) -> None:
    """As pieces of one document each."""
    for document in documents:
        writer.add(np.array(document, np.int64), np.array([len(document)], np.int64))
    writer.finish()


def ds(path: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "<u2") -> Path:
    write(DsWriter(path, dtype, "a|b"), documents)
    return path


def indexed(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "<u2") -> Path:
    write(IndexedWriter(prefix, dtype), documents)
    return prefix


def raw_idx(
    prefix: Path,
    ids: np.ndarray,
    code: int,
    lengths: list[int],
    bounds: list[int],
    *,
    pointers: list[int] | None = None,
    modes: bytes = b"",
) -> Path:
    """An index as its format says, whatever it says."""
    size = ids.dtype.itemsize
    found = pointers or [sum(lengths[:k]) * size for k in range(len(lengths))]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    arrays = np.array(lengths, "<i4").tobytes() + np.array(found, "<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(head + arrays + modes)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    return prefix


def source(name: str, path: Path, **options: Any) -> TokenSource:
    built: TokenSource = DATASETS.bind(name, options, key="data.args")(str(path), "raise")
    assert is_tokens(built)
    return built


def opened(name: str, path: Path, vocab_size: int = 100, **options: Any) -> Tokens:
    return source(name, path, **options).open(vocab_size)


def ids(tokens: Tokens) -> list[int]:
    return tokens.window(0, len(tokens)).tolist()


def starts(tokens: Tokens) -> list[int]:
    assert tokens.documents is not None
    return tokens.documents.starts(0, len(tokens.documents)).tolist()


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "half an id": ("nanoset", lambda f: cut(f / "x.ds", 9), r"x\.ds has 9 bytes, which are no whole ids of 2"),
    "fewer tokens": ("nanoset", lambda f: cut(f / "x.ds", 8), r"x\.ds has 8 bytes where its metadata says 5 tokens"),
    "half an end": ("nanoset", lambda f: cut(f / "x.ds.index", 12), r"x\.ds\.index has 12 bytes"),
    "fewer documents": (
        "nanoset",
        lambda f: cut(f / "x.ds.index", 8),
        r"x\.ds\.index ends its last document at token 3, but the file beside it holds 5",
    ),
    "falling ends": (
        "nanoset",
        lambda f: (f / "x.ds.index").write_bytes(np.array([4, 3, 5], "<u8").tobytes()),
        r"x\.ds\.index: document 1 ends before",
    ),
    "no metadata": (
        "nanoset",
        lambda f: (f / "x.ds.metadata").unlink(),
        r"no x\.ds\.metadata to say .*token_bytes",
    ),
    "strange metadata": ("nanoset", lambda f: (f / "x.ds.metadata").write_text("hello"), "does not begin with a line"),
    "strange size": ("nanoset", lambda f: (f / "x.ds.metadata").write_text("a|3\n5\n"), "an id has 3 bytes; 2 and 4"),
    "empty": (
        "nanoset",
        lambda f: [cut(f / "x.ds", 0), (f / "x.ds.metadata").write_text("a|2\n0\n")],
        "there is no token",
    ),
    "parquet": (
        "nanoset",
        lambda f: [(f / "x.ds").unlink(), (f / "a.parquet").write_bytes(b"PAR1....")],
        r"ends in \.ds \(there is a\.parquet, a parquet file\)",
    ),
    "nothing": ("nanoset", lambda f: [p.unlink() for p in f.iterdir()], "no file, folder or glob|has no file"),
    "cut .bin": ("megatron", lambda f: cut(f / "x.bin", 8), r"x\.bin has 8 bytes where its index takes 10 \(5 tokens"),
    "cut .idx": ("megatron", lambda f: cut(f / "x.idx", 80), r"x\.idx has 80 bytes where its 2 sequences .* 82 "),
    "cut header": ("megatron", lambda f: cut(f / "x.idx", 20), r"x\.idx is cut off: 20 bytes .* 34"),
    "no .bin": ("megatron", lambda f: (f / "x.bin").unlink(), r"cannot read .*x\.bin: No such file"),
    "another kind": ("megatron", lambda f: (f / "x.idx").write_bytes(b"TNTIDX" + bytes(90)), "does not begin as"),
    "version": ("megatron", lambda f: poke(f / "x.idx", 9, b"\2"), "has version 2 of the format"),
    "type": ("megatron", lambda f: poke(f / "x.idx", 17, b"\x09"), r"ids of type 9 \(byte 17\)"),
    "pointers": (
        "megatron",
        lambda f: poke(f / "x.idx", 42, b"\2"),
        "sequence 0 begins at byte 2, where the one before it ends at 0; .* 32 bits",
    ),
    "lengths": (
        "megatron",
        lambda f: poke(f / "x.idx", 34, struct.pack("<i", -3)),
        "sequence 0 has -3 tokens",
    ),
    "first bound": (
        "megatron",
        lambda f: poke(f / "x.idx", 58, b"\1"),
        "go from 1 to 2, not from 0 to its 2 seq",
    ),
    "last bound": ("megatron", lambda f: poke(f / "x.idx", 74, b"\1"), "go from 0 to 1, not from 0 to its 2 sequences"),
    "falling bounds": ("megatron", lambda f: poke(f / "x.idx", 66, b"\xff" * 8), "document 1 begins before"),
}


def poke(path: Path, offset: int, content: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:offset] + content + old[offset + len(content) :])


def message(case: str, folder: Path) -> ConfigError:
    """What is said of a case of BAD in ``folder``."""
    name, spoil, _ = BAD[case]
    path = ds(folder / "x.ds").parent if name == "nanoset" else indexed(folder / "x")
    spoil(folder)
    try:
        opened(name, path)
    except ConfigError as error:
        return error
    raise AssertionError(f"nothing is said of {case}")
