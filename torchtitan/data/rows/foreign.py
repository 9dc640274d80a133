"""``data.order = "source"``: the order in which the program trains that the files were made for.

What that is stands in the module of each program.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from torchtitan.data.blend import Blend, Source
from torchtitan.data.datasets.megatron import MegatronSource
from torchtitan.data.datasets.nanoset import NanosetSource
from torchtitan.data.rows.greedy import normalized
from torchtitan.data.rows.megatron import GptRows, blend_tables, samples_of
from torchtitan.data.rows.mixture import Mixture
from torchtitan.data.rows.nanoset import FolderRows, nanoset_tables
from torchtitan.data.rows.rows import SourceRows
from torchtitan.data.rows.tables import TabledRows
from torchtitan.errors import ConfigError

_PROGRAMS = (MegatronSource, NanosetSource)


def check_order(blend: Blend, *, order: str, packing: str, global_batch_size: int) -> None:
    """ConfigError for what no program defines an order of, and for options of an order that is not taken."""
    sources = list(blend.sources.values())
    for source in sources:
        with source.told():
            _check_source(source.data, order)
    if order != "source":
        return
    if len({type(source.data) for source in sources}) > 1:
        raise ConfigError("data.order", "no program reads nanoset and megatron together in an order; take native")
    if packing != "concat":
        raise ConfigError("data.packing", f'{packing} is not defined for data.order = "source"; take concat')
    if len(blend.stages) > 1:
        raise ConfigError(blend.stages[1].key, 'data.order = "source" knows no stages; take native, or leave this out')
    for source in sources:
        with source.told():
            if _program(source).order_seed != _program(sources[0]).order_seed:
                raise ConfigError("data.args.order_seed", "the sources of a blend have one; give all the same")
    if isinstance(sources[0].data, MegatronSource) and global_batch_size == -1:
        raise ConfigError(
            "training.global_batch_size",
            'with data.order = "source" the order of megatron is that for training.steps × this; give it as a number',
        )


def check_unordered(sources: Iterable[Source]) -> None:
    """ConfigError for options of an order of sources that are looked at as they lie."""
    for source in sources:
        with source.told():
            _check_split(source.data)
            for option in getattr(source.data, "order_options", ()):
                raise ConfigError(f"data.args.{option}", "orders what is trained on, not this; leave it out")


def _check_split(data: Any) -> None:
    """Two that leave it out mean the same only by chance."""
    if isinstance(data, MegatronSource) and data.lacks_split:
        raise ConfigError("data.args.split", 'say which split part is of, such as "969, 30, 1"')


def _check_source(data: Any, order: str) -> None:
    if order == "source":
        if not isinstance(data, _PROGRAMS):
            raise ConfigError("data.order", f"source is that of nanoset or megatron files; {data.name} has none")
        if isinstance(data, MegatronSource):
            data.check_one_file()
    elif isinstance(data, _PROGRAMS):
        _check_split(data)
        for option in data.order_options:
            raise ConfigError(f"data.args.{option}", 'means something for data.order = "source" only; leave it out')


def _program(source: Source) -> MegatronSource | NanosetSource:
    """The data set of a source that ``check_order`` has passed."""
    assert isinstance(source.data, _PROGRAMS)
    return source.data


def source_rows(
    sources: Mapping[str, Source],
    weights: Mapping[str, Fraction],
    *,
    vocab_size: int,
    seq_len: int,
    samples: int,
    cache_folder: str = "",
) -> dict[str, SourceRows]:
    """The rows of each of ``sources`` (all of one program) as its program has them, given that ``samples`` are taken of
    all of them by ``weights``."""
    shares = normalized([float(weights[name]) for name in sources])
    rows: dict[str, SourceRows] = {}
    for (name, source), share in zip(sources.items(), shares, strict=True):
        data = _program(source)
        with source.told():
            if isinstance(data, NanosetSource):
                rows[name] = FolderRows(data.open_files(vocab_size), seq_len=seq_len, seed=data.order_seed)
                continue
            rows[name] = GptRows(
                data.open_files(vocab_size)[0],
                seq_len=seq_len,
                samples=samples if len(sources) == 1 else samples_of(share, samples),
                seed=data.order_seed,
                split=data.split,
                part=data.part,
                cache_folder=cache_folder,
            )
    return rows


def in_their_order(
    sources: Mapping[str, Source],
    rows: Mapping[str, SourceRows],
    weights: Mapping[str, Fraction],
    *,
    samples: int,
    cache_folder: str = "",
) -> TabledRows | Mixture:
    """The ``rows`` that ``source_rows`` gave for ``sources``, blended as their program does."""
    shares = tuple(float(weights[name]) for name in rows)
    first = _program(next(iter(sources.values())))
    if isinstance(first, NanosetSource):
        lengths = tuple(part.rows_per_epoch for part in rows.values())
        tables = functools.partial(nanoset_tables, lengths, shares, first.order_seed)
        return TabledRows(rows, "Nanoset", tables, repeated=True, cache_folder=cache_folder)
    if len(rows) == 1:
        return Mixture(rows, [(0, dict.fromkeys(rows, Fraction(1)))])
    tables = functools.partial(blend_tables, shares, samples)
    return TabledRows(rows, "GPTDatasets", tables, repeated=False, cache_folder=cache_folder)
