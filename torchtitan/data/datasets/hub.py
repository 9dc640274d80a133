"""Data sets of the Hugging Face hub, and of folders that their library made: in one, or as a stream.

How a stream is read while training goes on is in tokens/stream.py. Credentials come from the environment, as their
library finds them; no code of a data set is run. Their library takes seconds to import, so only who needs it does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from torchtitan.config.paths import local_path
from torchtitan.data.columns import ROWS_AT_ONCE, column_problem, texts
from torchtitan.data.contents import sampled_together
from torchtitan.data.datasets import (
    DATASETS,
    Interrupted,
    OnBadRecord,
    Place,
    Skipped,
    StreamSource,
    TextSource,
    needed,
    refused,
)
from torchtitan.data.files import KEY, TextFile, cannot_read, piece_bytes, refuse_changed
from torchtitan.data.hub import broke_off, cause_of, find_commit, plainly
from torchtitan.errors import ConfigError, listed, one_line

if TYPE_CHECKING:
    import datasets

_BUILDERS = ("arrow", "csv", "json", "parquet", "text", "webdataset")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

Split = Annotated[str | None, Field(min_length=1, description="split of the data set; none: train")]
Revision = Annotated[str | None, Field(description="commit, tag or branch at the hub; none: the newest, said aloud")]
DocumentsAtOnce = Annotated[
    int | None, Field(description="documents of a stream tokenised between two notes of its place (1024)", ge=1)
]
ShuffleRows = Annotated[
    int | None, Field(description="rows of a stream that are shuffled among themselves (512)", ge=1, le=1 << 20)
]


@DATASETS.register("hub")
def build_hub(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    config: Annotated[str | None, Field(description="configuration of the data set; none: its default")] = None,
    split: Split = None,
    revision: Revision = None,
    text_key: Annotated[str, Field(description="column of the text")] = "text",
    data_files: Annotated[list[str], Field(description="files of it that are read; none: all of the split")] = [],  # noqa: B006
    streaming: Annotated[bool, Field(description="read while training goes on, and download nothing before")] = False,
    documents_at_once: DocumentsAtOnce = None,
    shuffle_rows: ShuffleRows = None,
) -> TextSource | StreamSource:
    """Hugging Face ``datasets``: a name at the hub, a folder, or a format (json, csv, parquet) with ``data_files``."""
    given = needed(path, "hub")
    for name, value in (("documents_at_once", documents_at_once), ("shuffle_rows", shuffle_rows)):
        if value is not None and not streaming:
            raise ConfigError(f"data.args.{name}", "is of streams; set data.args.streaming = true, or leave it out")
    wanted, split = split, split or "train"
    choice = (config, split, data_files, text_key, on_bad_record)
    if is_saved(given):
        if streaming or config or data_files or revision:
            raise ConfigError(
                KEY,
                f"{given} was made by save_to_disk and is read where it lies: leave out streaming, config, revision "
                "and data_files of data.args",
            )
        saved = _load_saved(given, wanted, text_key)
        return HubSource(given, lambda: saved, choice, split, on_bad_record, text_key)
    commit, opened = _open(given, config, revision, data_files)
    shown = given
    if data_files:
        shown += f" ({', '.join(data_files[:2])}{', …' if len(data_files) > 2 else ''})"
    _check_split(opened, shown, split)
    if not streaming:
        load = functools.partial(_prepare, opened, shown, split, text_key)
        return HubSource(shown, load, choice, split, on_bad_record, text_key)
    with plainly(shown):
        stream = opened.as_streaming_dataset(split=split)
    _check_column(stream.features, shown, text_key)
    local = [] if commit else _local_files(opened, split)
    return HubStream(
        shown,
        stream,
        (*choice, given, commit or _facts_of(opened, split, local)),
        local,
        split,
        on_bad_record,
        text_key,
        documents_at_once=documents_at_once or 1024,
        shuffle_rows=shuffle_rows or 512,
    )


class HubSource:
    """A data set whose rows can be read in any order; its pieces are ranges of them."""

    name = "hub"

    def __init__(
        self,
        path: str,
        load: Callable[[], datasets.Dataset],
        facts: tuple[Any, ...],
        split: str,
        on_bad_record: OnBadRecord,
        text_key: str,
    ) -> None:
        self.description = f"{split} of {path}"
        self._path, self._load, self._facts = path, load, facts
        self._on_bad_record, self._text_key = on_bad_record, text_key

    @functools.cached_property
    def _loaded(self) -> datasets.Dataset:
        """Downloaded, when somebody asks for the first time."""
        return self._load()

    @functools.cached_property
    def _rows(self) -> datasets.Dataset:
        return self._loaded.select_columns([self._text_key]).with_format("arrow")

    @functools.cached_property
    def fingerprint(self) -> str:
        # The library's own is of the commit or the files that it read, and the same without the network.
        return hashlib.sha256(repr(("hub", self._facts, self._loaded._fingerprint)).encode()).hexdigest()

    @functools.cached_property
    def num_pieces(self) -> int:
        size = self._rows.data.nbytes
        return max(1, min(len(self._rows), size // piece_bytes(size)))

    def read(self, piece: int) -> Iterator[str | Skipped]:
        first, last = (len(self._rows) * k // self.num_pieces for k in (piece, piece + 1))
        for start in range(first, last, ROWS_AT_ONCE):
            table = self._rows[start : min(start + ROWS_AT_ONCE, last)]
            yield from _documents(table, start, self._path, "row", self._text_key, self._on_bad_record)


class HubStream:
    """A data set that is read from its beginning to its end, from the network or from files."""

    name = "hub"

    def __init__(
        self,
        path: str,
        stream: datasets.IterableDataset,
        facts: tuple[Any, ...],
        local: list[TextFile],
        split: str,
        on_bad_record: OnBadRecord,
        text_key: str,
        *,
        documents_at_once: int,
        shuffle_rows: int,
    ) -> None:
        self.description = f"{split} of {path}"
        self.fingerprint = hashlib.sha256(repr(("stream", facts)).encode()).hexdigest()
        self.documents_at_once, self.shuffle_rows = documents_at_once, shuffle_rows
        self._path, self._stream, self._local = path, stream, local
        self._on_bad_record, self._text_key = on_bad_record, text_key

    def read_from(self, place: Place) -> Iterator[tuple[list[str | Skipped], Place]]:
        records = place.records
        try:
            stream = self._stream.with_format("arrow")
            if place.state is not None:
                stream.load_state_dict(place.state)
            elif records:
                stream = self._stream.skip(records).with_format("arrow")
            # In batches, and not one by one, for that would give a loader's worker its share of the files only.
            for table in stream.iter(batch_size=min(ROWS_AT_ONCE, self.documents_at_once)):
                found = list(_documents(table, records, self._path, "record", self._text_key, self._on_bad_record))
                records += len(found)
                # That of a stream which skipped to its place would fit no other.
                state = stream.state_dict() if place.state is not None or not place.records else None
                yield found, Place(records, state)
            refuse_changed(self._local)
        except ConfigError:
            raise
        except Exception as error:  # each of the libraries below has its own
            if broke_off(error):
                raise Interrupted(one_line(error)) from None
            raise ConfigError(
                KEY, f"{self._path}: cannot be read after record {records:,} ({cause_of(error)})"
            ) from None


def _documents(
    table: Any, before: int, path: str, unit: str, text_key: str, on_bad_record: OnBadRecord
) -> Iterator[str | Skipped]:
    """The texts of a table, of whose data set ``before`` rows come first."""
    problem = column_problem(table.schema, text_key)
    found = (ValueError(problem) for _ in range(len(table))) if problem else None
    row = before
    for chunk in [found] if found is not None else map(texts, table.column(text_key).chunks):
        for text in chunk:
            row += 1
            if isinstance(text, str):
                yield text
                continue
            skipped = Skipped(f"{path}: {unit} {row}: {text}")
            if on_bad_record == "raise":
                raise refused(skipped)
            yield skipped


def is_saved(path: str) -> bool:
    """Whether ``save_to_disk`` made the folder at ``path``."""
    folder = local_path(path, KEY)
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _load_saved(path: str, wanted: str | None, text_key: str) -> datasets.Dataset:
    import datasets

    with plainly(path):
        found = datasets.load_from_disk(str(local_path(path, KEY)))
    if isinstance(found, datasets.DatasetDict):
        split = wanted or "train"
        if split not in found:
            raise ConfigError(KEY, f"{path}: no split {split!r} (there are: {listed(found)}; set data.args.split)")
        found = found[split]
    elif wanted not in (None, str(found.split)):
        what = "one data set" if found.split is None else f"the split {found.split}"
        raise ConfigError("data.args.split", f"{path} holds {what} and no other; leave this out")
    _check_column(found.features, path, text_key)
    return found


def _open(
    path: str, config: str | None, revision: str | None, data_files: list[str]
) -> tuple[str | None, datasets.DatasetBuilder]:
    """The commit of data at the hub, where it is known, and the library's builder of the data."""
    local = local_path(path, KEY)
    commit = None
    if local.is_file():
        raise ConfigError(
            KEY, f"{path} is a file; set training.dataset to jsonl, parquet or text, or give its folder here"
        )
    if local.is_dir() or path in _BUILDERS:
        if revision is not None:
            raise ConfigError("data.args.revision", f"{path} does not come from the hub and has no revisions")
        if path in _BUILDERS and not local.is_dir() and not data_files:
            raise ConfigError("data.args.data_files", f"are missing: which files does {path} mean?")
        path = str(local) if local.is_dir() else path
    elif _HUB_NAME.fullmatch(path):
        commit = find_commit(path, revision)
    else:
        raise ConfigError(
            KEY,
            f"there is no folder {path}, and a name at the hub is like allenai/c4 (working directory {os.getcwd()})",
        )
    import datasets

    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()
    with plainly(path):
        builder = datasets.load_dataset_builder(
            path, name=config, revision=commit or revision, data_files=data_files or None
        )
    return commit, builder


def _check_split(builder: datasets.DatasetBuilder, path: str, split: str) -> None:
    there = list(map(str, builder.info.splits or builder.config.data_files or ()))
    wanted = re.match(r"[\w.-]*", split)
    if there and wanted and wanted[0] not in [*there, "all"]:
        raise ConfigError(KEY, f"{path}: no split {split!r} (there are: {listed(there)}; set data.args.split)")


def _check_column(features: datasets.Features | None, path: str, text_key: str) -> None:
    if features is not None:
        problem = column_problem(features.arrow_schema, text_key)
        if problem:
            raise ConfigError(KEY, f"{path}: {problem}")


def _prepare(builder: datasets.DatasetBuilder, path: str, split: str, text_key: str) -> datasets.Dataset:
    """Download what is missing, and open it."""
    with plainly(path):
        builder.download_and_prepare()
        found = builder.as_dataset(split=split)
    _check_column(found.features, path, text_key)
    return found


def _local_files(builder: datasets.DatasetBuilder, split: str) -> list[TextFile]:
    """The files of this machine that a stream reads."""
    files = []
    for name in _named_files(builder, split):
        if os.path.isfile(name):
            status = os.stat(name)
            files.append(TextFile(Path(name), os.path.basename(name), status.st_size, status.st_mtime_ns))
    return files


def _facts_of(builder: datasets.DatasetBuilder, split: str, local: list[TextFile]) -> tuple[Any, ...]:
    """What tells the files of a stream from others: names, and of those of this machine sizes, times and a sample."""
    known = {str(file.path): (file.name, file.size, file.mtime_ns) for file in local}
    try:
        content = sampled_together([file.path for file in local])
    except OSError as error:
        raise cannot_read(error) from None
    return [known.get(name, (name, 0, 0)) for name in _named_files(builder, split)], content


def _named_files(builder: datasets.DatasetBuilder, split: str) -> list[str]:
    return [str(name) for name in (builder.config.data_files or {}).get(split, [])]
