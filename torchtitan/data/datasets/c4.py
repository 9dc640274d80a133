"""C4 under the names it has in configs written for TorchTitan: a stream from the hub, or what lies at a path.

How the hub is read is in hub.py.
"""

from __future__ import annotations

from pathlib import Path

from torchtitan.data.datasets import DATASETS, OnBadRecord, StreamSource, TextSource
from torchtitan.data.datasets.hub import DocumentsAtOnce, Revision, ShuffleRows, build_hub, is_saved
from torchtitan.data.datasets.json_lines import build_jsonl
from torchtitan.data.datasets.parquet import build_parquet
from torchtitan.data.datasets.text_files import TextKey
from torchtitan.errors import ConfigError

_NAME, _CONFIG = "allenai/c4", "en"


@DATASETS.register("c4")
def build_c4(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    text_key: TextKey = "text",
    revision: Revision = None,
    documents_at_once: DocumentsAtOnce = None,
    shuffle_rows: ShuffleRows = None,
) -> TextSource | StreamSource:
    """C4's English training text: allenai/c4 as a stream from the hub; with a path, the parquet or JSON lines there."""
    return _build(path, on_bad_record, "train", text_key, revision, documents_at_once, shuffle_rows)


@DATASETS.register("c4_validation")
def build_c4_validation(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    text_key: TextKey = "text",
    revision: Revision = None,
    documents_at_once: DocumentsAtOnce = None,
    shuffle_rows: ShuffleRows = None,
) -> TextSource | StreamSource:
    """C4's English validation text, found as ``c4`` is."""
    return _build(path, on_bad_record, "validation", text_key, revision, documents_at_once, shuffle_rows)


def _build(
    path: str | None,
    on_bad_record: OnBadRecord,
    split: str,
    text_key: str,
    revision: str | None,
    documents_at_once: int | None,
    shuffle_rows: int | None,
) -> TextSource | StreamSource:
    if path is None:
        return build_hub(
            _NAME,
            on_bad_record,
            config=_CONFIG,
            split=split,
            revision=revision,
            text_key=text_key,
            streaming=True,
            documents_at_once=documents_at_once,
            shuffle_rows=shuffle_rows,
        )
    of_the_hub = {"revision": revision, "documents_at_once": documents_at_once, "shuffle_rows": shuffle_rows}
    for name, value in of_the_hub.items():
        if value is not None:
            raise ConfigError(f"data.args.{name}", "is of the hub's stream; leave it out, or training.dataset_path")
    if is_saved(path):
        return build_hub(path, on_bad_record, split=split, text_key=text_key)
    folder = Path(path).expanduser()
    # A copy of the hub's folder holds both splits, each in files of its name.
    for own in (folder / _CONFIG, folder):
        if own.is_dir() and any(own.glob(f"c4-{split}.*")):
            return build_jsonl(str(own / f"c4-{split}.*"), on_bad_record, text_key=text_key)
    holds_parquet = folder.is_dir() and any(folder.rglob("*.parquet"))
    if holds_parquet or folder.name.endswith((".parquet", ".pq")):
        return build_parquet(path, on_bad_record, text_key=text_key)
    return build_jsonl(path, on_bad_record, text_key=text_key)
