"""The data sets of a run by name, and the stages in which they are blended: from what is configured to tokens.

How rows are drawn from a blend is in rows/mixture.py; what a data set is, in datasets/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from torchtitan.config.tables import SOURCES, TableList
from torchtitan.data.datasets import AnySource, OnBadRecord, is_stream, is_tokens, source_builder
from torchtitan.data.files import KEY
from torchtitan.data.tokens.cache import open_tokens
from torchtitan.data.tokens.encode import Encoding
from torchtitan.data.tokens.store import Tokens
from torchtitan.data.tokens.stream import open_stream
from torchtitan.errors import ConfigError, keys_told_as


@dataclass(frozen=True)
class Source:
    """A data set of a run. It knows itself as that of [training]; if it stands elsewhere, ``told_as`` are its keys, and
    ``name`` tells it from the others."""

    data: AnySource
    told_as: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    def told(self) -> AbstractContextManager[None]:
        """Within, errors tell of this one."""
        return keys_told_as(self.told_as, self.name)

    @property
    def is_text(self) -> bool:
        """Whether it is to be tokenised."""
        return not is_tokens(self.data)

    def open(self, encoding: Encoding | None, vocab_size: int, *, cache_folder: str, rank: int, ranks: int) -> Tokens:
        """Its tokens, ids below ``vocab_size``; all ``ranks`` share the work of tokenising text with ``encoding``."""
        with self.told():
            if is_tokens(self.data):
                return self.data.open(vocab_size)
            assert encoding is not None
            if is_stream(self.data):
                return open_stream(self.data, encoding, cache_folder=cache_folder)
            return open_tokens(self.data, encoding, cache_folder=cache_folder, rank=rank, ranks=ranks)


@dataclass(frozen=True)
class Stage:
    """From step ``from_step`` on, counted from 1, rows come from the sources named in ``weights``."""

    from_step: int
    weights: Mapping[str, Fraction]
    key: str


@dataclass(frozen=True)
class Blend:
    """The sources of a run by name, and its stages in order, of which the first begins with step 1."""

    sources: Mapping[str, Source]
    stages: Sequence[Stage]


def plan_one(dataset: str, path: str | None, options: Mapping[str, Any], on_bad_record: OnBadRecord) -> Blend:
    """A run on one data set, which never changes."""
    data = source_builder(dataset, options, on_bad_record, key="training.dataset")(path)
    name = _name_of(dataset, path)
    return Blend({name: Source(data)}, [Stage(1, {name: Fraction(1)}, "training.dataset")])


def plan_blend(tables: Sequence[Mapping[str, Any]], on_bad_record: OnBadRecord) -> Blend:
    """What ``[[data.sources]]`` says, read as ``config/tables.py`` does; ConfigError, on ``data.sources[i].…``, for
    what does not fit together."""
    sources: dict[str, Source] = {}
    meant: dict[str, Mapping[str, Any]] = {}
    first: dict[str, str] = {}
    stages: dict[int, tuple[dict[str, Fraction], str]] = {}
    for number, table in enumerate(tables):
        key = f"{SOURCES.key}[{number}]"
        data_set = {entry: value for entry, value in table.items() if entry not in ("weight", "from_step", "name")}
        path = table.get("dataset_path")
        name = table.get("name") or _name_of(table["dataset"], path)
        if name not in sources:
            sources[name] = bind_table(table, SOURCES, key, on_bad_record, name=name)
            meant[name] = data_set
            first[name] = key
        elif meant[name] != data_set:
            raise ConfigError(f"{key}.name", f"{name!r} is another data set in {first[name]}; give each its own")
        weights, _ = stages.setdefault(table.get("from_step", 1), ({}, f"{key}.from_step"))
        if name in weights:
            raise ConfigError(f"{key}.name", f"{name!r} is in this blend already; give it a name of its own")
        weights[name] = Fraction(repr(table.get("weight", 1.0)))
    if 1 not in stages:
        raise ConfigError(f"{SOURCES.key}[0].from_step", "no source is there from step 1 on; leave it out for some")
    return Blend(sources, [Stage(step, *stages[step]) for step in sorted(stages)])


def bind_table(
    table: Mapping[str, Any], tables: TableList, key: str, on_bad_record: OnBadRecord, *, name: str
) -> Source:
    """The data set of one of ``tables``, which stands under ``key`` with its options beside its entries."""
    options = {entry: value for entry, value in table.items() if entry not in tables.entries}
    path = table.get("dataset_path")
    return bind_source(table["dataset"], path, options, on_bad_record, section=key, options_in=key, name=name)


def bind_source(
    dataset: str,
    path: str | None,
    options: Mapping[str, Any],
    on_bad_record: OnBadRecord,
    *,
    section: str,
    options_in: str,
    name: str,
) -> Source:
    """The data set ``name`` that ``section`` has, such as ``data.sources[1]``, with the options in ``options_in``."""
    told_as = {KEY: f"{section}.dataset_path", "training.dataset": f"{section}.dataset", "data.args": options_in}
    with keys_told_as(told_as):
        return Source(source_builder(dataset, options, on_bad_record, key=options_in)(path), told_as, name)


def _name_of(dataset: str, path: str | None) -> str:
    """What a source is called that has no name: its file or folder, else its data set."""
    stem = Path(path.rstrip("/")).name.partition(".")[0] if path else ""
    word = "".join(c if c.isprintable() and c not in " /\\" else "-" for c in stem)
    return word.strip("*?[]-") or dataset
