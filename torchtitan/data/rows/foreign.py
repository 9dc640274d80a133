"""``data.order = "source"``: which sources have an order of their own, and the rows of it.

The orders are in the modules of their programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan.data.datasets import TokenSource
from torchtitan.data.datasets.megatron import MegatronSource
from torchtitan.data.datasets.nanoset import NanosetSource
from torchtitan.errors import ConfigError

_ORDER = "data.order"


def check_order(sources: Sequence[Any], *, order: str, packing: str) -> None:
    """ConfigError for what no order of a source is defined for; reads nothing.

    ``sources`` are what the builders of the data sets gave.
    """
    if order != "source":
        for source in sources:
            if isinstance(source, TokenSource) and source.order_options:
                option = next(iter(source.order_options))
                raise ConfigError(f"data.args.{option}", 'means something for data.order = "source" only; leave it out')
        return
    names = {source.name for source in sources}
    if not names <= {"nanoset", "megatron"}:
        raise ConfigError(
            _ORDER,
            f"source is the order in which nanoset and megatron are read by their own programs; "
            f"{min(names - {'nanoset', 'megatron'})} has none: take native",
        )
    if len(names) > 1:
        raise ConfigError(_ORDER, "source is not defined for nanoset and megatron together; take native")
    if packing != "concat":
        raise ConfigError("data.packing", f'{packing} is not defined for data.order = "source"; take concat')
    seeds = {source.order_seed for source in sources}
    if len(seeds) > 1:
        raise ConfigError("data.args.order_seed", "all sources of a blend have one; give the same to each")
    for source in sources:
        if isinstance(source, MegatronSource):
            source.check_one_file()


def open_foreign(
    sources: Sequence[Any],
    weights: Sequence[float] | None,
    *,
    vocab_size: int,
    seq_len: int,
    samples: int,
    cache_folder: str = "",
) -> Any:
    """Rows of ``sources`` (which ``check_order`` has passed) in the order of their own program.

    ``samples`` is how many rows training takes in all; ``weights`` are shares of samples, None where none are given.
    """
    from torchtitan.data.rows.greedy import normalized
    from torchtitan.data.rows.megatron import BlendedGptRows, GptRows, samples_of
    from torchtitan.data.rows.nanoset import NanosetRows

    first = sources[0]
    if isinstance(first, NanosetSource):
        return NanosetRows(
            [source.open_files(vocab_size) for source in sources],
            weights,
            seq_len=seq_len,
            seed=first.order_seed,
            cache_folder=cache_folder,
        )
    weights = weights or [1.0] * len(sources)
    parts = [
        GptRows(
            source.open_files(vocab_size)[0],
            seq_len=seq_len,
            samples=samples if len(sources) == 1 else samples_of(share, samples),
            seed=source.order_seed,
            split=source.split,
            part=source.part,
            cache_folder=cache_folder,
        )
        for source, share in zip(sources, normalized(weights), strict=True)
    ]
    return parts[0] if len(parts) == 1 else BlendedGptRows(parts, weights, samples, cache_folder)
