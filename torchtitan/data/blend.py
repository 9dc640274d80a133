"""The data sets of a run by name, and the stages in which they are blended: from what is configured to tokens.

How rows are drawn from a blend is in rows/mixture.py; what a data set is, in datasets/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from torchtitan.config.tables import SOURCES
from torchtitan.data.datasets import DATASETS, OnBadRecord, TextSource, TokenSource
from torchtitan.data.files import KEY
from torchtitan.data.tokens.cache import open_tokens
from torchtitan.data.tokens.encode import Encoding
from torchtitan.data.tokens.store import Tokens
from torchtitan.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """A data set of a run, and the key that it stands under, such as ``data.sources[1]``; None for [training]'s own."""

    data: TextSource | TokenSource
    key: str | None


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

    @property
    def reads_text(self) -> bool:
        """Whether there is anything to tokenise."""
        return any(not isinstance(source.data, TokenSource) for source in self.sources.values())

    def open(
        self, encoding: Encoding | None, vocab_size: int, *, cache_folder: str, rank: int, ranks: int
    ) -> dict[str, Tokens]:
        """The tokens of every source, ids below ``vocab_size``; all ``ranks`` share the work of tokenising text with
        ``encoding``."""
        opened: dict[str, Tokens] = {}
        for name, source in self.sources.items():
            with told_under(source.key):
                if isinstance(source.data, TokenSource):
                    opened[name] = source.data.open(vocab_size)
                    continue
                assert encoding is not None
                opened[name] = open_tokens(
                    source.data,
                    encoding.tokenizer,
                    bos_id=encoding.bos_id,
                    eos_id=encoding.eos_id,
                    cache_folder=cache_folder,
                    rank=rank,
                    ranks=ranks,
                )
        return opened


def plan_one(dataset: str, path: str | None, options: Mapping[str, Any], on_bad_record: OnBadRecord) -> Blend:
    """A run on one data set, which never changes."""
    data = DATASETS.bind(dataset, options, key="training.dataset")(path, on_bad_record=on_bad_record)
    name = _name_of(dataset, path)
    return Blend({name: Source(data, None)}, [Stage(1, {name: Fraction(1)}, "training.dataset")])


def plan_blend(tables: Sequence[Mapping[str, Any]], on_bad_record: OnBadRecord) -> Blend:
    """What ``[[data.sources]]`` says, read as ``config/tables.py`` does; ConfigError, on ``data.sources[i].…``, for
    what does not fit together."""
    sources: dict[str, Source] = {}
    meant: dict[str, Mapping[str, Any]] = {}
    stages: dict[int, tuple[dict[str, Fraction], str]] = {}
    for number, table in enumerate(tables):
        key = f"{SOURCES.key}[{number}]"
        data_set = {entry: value for entry, value in table.items() if entry not in ("weight", "from_step", "name")}
        path = table.get("dataset_path")
        name = table.get("name") or _name_of(table["dataset"], path)
        if name not in sources:
            options = {entry: value for entry, value in data_set.items() if entry not in SOURCES.entries}
            with told_under(key):
                bound = DATASETS.bind(table["dataset"], options, key=key)
                sources[name] = Source(bound(path, on_bad_record=on_bad_record), key)
            meant[name] = data_set
        elif meant[name] != data_set:
            raise ConfigError(f"{key}.name", f"{name!r} is another data set in {sources[name].key}; give each its own")
        weights, _ = stages.setdefault(table.get("from_step", 1), ({}, f"{key}.from_step"))
        if name in weights:
            raise ConfigError(f"{key}.name", f"{name!r} is in this blend already; give it a name of its own")
        weights[name] = Fraction(repr(table.get("weight", 1.0)))
    if 1 not in stages:
        raise ConfigError(f"{SOURCES.key}[0].from_step", "no source is there from step 1 on; leave it out for some")
    return Blend(sources, [Stage(step, *stages[step]) for step in sorted(stages)])


@contextlib.contextmanager
def told_under(key: str | None) -> Iterator[None]:
    """Within, an error that names a key of the one data set of [training] names that of the table ``key``."""
    try:
        yield
    except ConfigError as error:
        if key is not None and error.key is not None:
            here = {KEY: f"{key}.dataset_path", "training.dataset": f"{key}.dataset", "data.args": key}
            for own, there in here.items():
                if error.key == own or error.key.startswith(f"{own}."):
                    error.key = there + error.key.removeprefix(own)
                    break
        raise


def _name_of(dataset: str, path: str | None) -> str:
    """What a source is called that has no name: its file or folder, else its data set."""
    stem = Path(path.rstrip("/")).name.partition(".")[0] if path else ""
    word = "".join(c if c.isprintable() and c not in " /\\" else "-" for c in stem)
    return word.strip("*?[]-") or dataset
