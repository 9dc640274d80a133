import hashlib
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan.data import files
from torchtitan.data.datasets import DATASETS, Skipped, TextSource
from torchtitan.errors import ConfigError


def build(path: Path, on_bad_record: str = "raise", **options: Any) -> TextSource:
    return DATASETS.bind("parquet", options, key="data.args")(str(path), on_bad_record)


def read(source: TextSource) -> list[Any]:
    return [document for piece in range(source.num_pieces) for document in source.read(piece)]


def write(path: Path, texts: Any, rows: int = 1000, column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    pq.write_table(pa.table({"id": range(len(array)), column: array}), path, row_group_size=rows)
    return path


def unchecked(values: list[bytes]) -> pa.Array:
    """Bytes that are called text."""
    buffers = pa.array(values).buffers()
    return pa.StringArray.from_buffers(len(values), buffers[1], buffers[2])


def test_rows_of_a_folder_in_order(tmp_path: Path) -> None:
    write(tmp_path / "year=2020" / "b.parquet", ["three", ""])
    write(tmp_path / "a.parquet", ["one", "two é"], rows=1)
    (tmp_path / "_SUCCESS").touch()
    assert read(build(tmp_path)) == ["one", "two é", "three", ""]
    assert read(build(tmp_path / "**" / "b.*")) == ["three", ""]
    assert read(build(write(tmp_path / "c.parquet", ["x"], column="body"), text_key="body")) == ["x"]


@pytest.mark.parametrize("piece_bytes", [150, 1000, 4000, 1 << 20])
def test_each_row_group_is_in_one_piece(tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MIN_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(files, "_MAX_PIECE_BYTES", piece_bytes)
    texts = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(500)]
    for number, rows in enumerate((7, 100, 1000)):
        write(tmp_path / f"{number}.parquet", texts, rows)
    source = build(tmp_path)
    assert read(source) == texts * 3
    assert source.num_pieces == 1 or source.num_pieces > 20


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_kinds_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["a", "é", None, "", "a"]
    array = pa.array([t and t.encode() for t in texts], kind) if kind == pa.binary() else pa.array(texts, kind)
    path = write(tmp_path / "a.parquet", array, rows=2)
    with pytest.raises(ConfigError, match=r"a\.parquet: row 3: null, not text; .*data\.on_bad_record = skip") as error:
        read(build(path))
    assert error.value.key == "training.dataset_path"
    a, e, skipped, *rest = read(build(path, "skip"))
    assert [a, e, *rest] == ["a", "é", "", "a"] and isinstance(skipped, Skipped)


def test_text_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", unchecked([b"good", b"bad \xff", b"", "é".encode()]), rows=3)
    with pytest.raises(ConfigError, match=r"a\.parquet: row 2: not UTF-8 \(byte 0xff\)"):
        read(build(path))
    assert [str(d) for d in read(build(path, "skip"))] == ["good", f"{path}: row 2: not UTF-8 (byte 0xff)", "", "é"]


def test_without_the_column(tmp_path: Path) -> None:
    path = write(tmp_path / "b.parquet", ["x", "y"], column="body")
    with pytest.raises(ConfigError, match=r"b\.parquet: no column 'text' \(there are: id, body; set data.args.text_k"):
        build(path)
    with pytest.raises(ConfigError, match=r"b\.parquet: column 'id' holds int64, not text"):
        build(path, text_key="id")
    # Found on the way, it is as many bad records as it has rows.
    write(tmp_path / "a.parquet", ["first"])
    with pytest.raises(ConfigError, match=r"b\.parquet: row 1: no column 'text'"):
        read(build(tmp_path))
    first, *skipped = read(build(tmp_path, "skip"))
    assert first == "first" and [str(s).split(": ")[1] for s in skipped] == ["row 1", "row 2"]


def test_damaged_files(tmp_path: Path) -> None:
    texts = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(100)]
    path = write(tmp_path / "a.parquet", texts, rows=50)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet: a parquet file that is damaged or truncated"):
        build(path)
    write(tmp_path / "b.parquet", ["good"])
    skipped, good = read(build(tmp_path, "skip"))
    assert isinstance(skipped, Skipped) and good == "good"
    column = pq.read_metadata(tmp_path / "b.parquet") and pq.ParquetFile(pa.BufferReader(whole)).metadata
    begin = column.row_group(1).column(1).data_page_offset
    path.write_bytes(whole[:begin] + b"\xff" * 40 + whole[begin + 40 :])
    documents = read(build(path, "skip"))
    assert documents[:50] == texts[:50] and len(documents) == 100
    assert all("row group 1 is damaged" in str(d) for d in documents[50:])


def test_other_kinds_are_told_what_to_do(tmp_path: Path) -> None:
    lines = tmp_path / "a.parquet"
    lines.write_text('{"text": "x"}\n')
    with pytest.raises(ConfigError, match=r"a\.parquet is no parquet file.*set training.dataset = jsonl"):
        build(lines)
    path = write(tmp_path / "b.parquet", ["x"])
    for name in ("text", "jsonl"):
        with pytest.raises(ConfigError, match=r"b\.parquet is a parquet file.*set training\.dataset = parquet"):
            DATASETS.bind(name, {}, key="data.args")(str(path), "raise")


def test_thousands_of_files_start_fast(tmp_path: Path) -> None:
    whole = write(tmp_path / "0.parquet", ["x"]).read_bytes()
    for number in range(2000):
        (tmp_path / f"{number}.parquet").write_bytes(whole)
    started = time.monotonic()
    source = build(tmp_path)
    assert time.monotonic() - started < 2
    assert source.num_pieces < 200 and next(iter(source.read(source.num_pieces - 1))) == "x"
