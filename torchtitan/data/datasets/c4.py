"""C4 under the names it has in configs written for TorchTitan: a stream from the hub, or what lies at a path.

How the hub is read is in hub.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.config.paths import local_path
from torchtitan.data.datasets import DATASETS, OnBadRecord, StreamSource, TextSource, needed
from torchtitan.data.datasets.hub import DocumentsAtOnce, Revision, ShuffleRows, build_hub, is_saved
from torchtitan.data.datasets.json_lines import build_jsonl
from torchtitan.data.datasets.parquet import build_parquet
from torchtitan.data.datasets.text_files import TextKey
from torchtitan.data.files import KEY
from torchtitan.errors import ConfigError

_NAME, _CONFIG = "allenai/c4", "en"


def _builder(split: str, what: str) -> Callable[..., TextSource | StreamSource]:
    def build(
        path: str | None,
        on_bad_record: OnBadRecord,
        *,
        text_key: TextKey = "text",
        revision: Revision = None,
        documents_at_once: DocumentsAtOnce = None,
        shuffle_rows: ShuffleRows = None,
    ) -> TextSource | StreamSource:
        of_the_hub: dict[str, Any] = {
            "revision": revision,
            "documents_at_once": documents_at_once,
            "shuffle_rows": shuffle_rows,
        }
        if path is None:
            return build_hub(
                _NAME, on_bad_record, config=_CONFIG, split=split, text_key=text_key, streaming=True, **of_the_hub
            )
        for name, value in of_the_hub.items():
            if value is not None:
                raise ConfigError(f"data.args.{name}", "is of the hub's stream; leave it out, or training.dataset_path")
        return _build_local(path, on_bad_record, split, text_key)

    build.__doc__ = what
    return build


def _build_local(path: str, on_bad_record: OnBadRecord, split: str, text_key: str) -> TextSource | StreamSource:
    folder = local_path(needed(path, "c4"), KEY)
    if is_saved(path):
        several = (folder / "dataset_dict.json").is_file()
        return build_hub(path, on_bad_record, split=split if several else None, text_key=text_key)
    # A copy of the hub's folder holds both splits, each in files of its name.
    for own in (folder / _CONFIG, folder):
        if own.is_dir() and any(own.glob(f"c4-{split}.*")):
            return build_jsonl(str(own / f"c4-{split}.*"), on_bad_record, text_key=text_key)
    holds_parquet = folder.is_dir() and any(folder.rglob("*.parquet"))
    if holds_parquet or folder.name.endswith((".parquet", ".pq")):
        return build_parquet(path, on_bad_record, text_key=text_key)
    return build_jsonl(path, on_bad_record, text_key=text_key)


DATASETS.register(
    "c4",
    _builder(
        "train",
        "C4's English training text: allenai/c4 as a stream from the hub; with a path, the parquet or JSON lines "
        "there.",
    ),
)
DATASETS.register("c4_validation", _builder("validation", "C4's English validation text, found as ``c4`` is."))
