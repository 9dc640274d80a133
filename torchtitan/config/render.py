"""The resolved configuration as TOML that loads again to the same, with secrets masked.

Help and reference, which describe keys and not values, are in help.py; what is a secret is known in ``secrets.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.overrides import Path
from torchtitan.config.schema import TABLES, JobConfig
from torchtitan.config.toml import key_text, value_text
from torchtitan.secrets import masked


def to_toml(config: JobConfig, *, sources: bool = False) -> str:
    """``config`` as TOML; with ``sources``, where each value that is not a default was written stands beside it.

    None cannot be said in TOML and is left out. ``job.config_file`` is left out too: it is where this came from.
    """
    tree = config.model_dump(exclude={"converter_args": True, "job": {"config_file"}})
    for name, options in config.converter_args.items():
        table = tree
        for part in name.split("."):
            table = table.setdefault(part, {})
        table.update(options)
    return "\n".join(_table_lines(tree, (), config if sources else None)).lstrip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], path: Path, config: JobConfig | None) -> Iterator[str]:
    entries = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    if path and (entries or not inner):
        yield f"\n[{'.'.join(map(key_text, path))}]"
    for name, value in entries.items():
        if value is None:
            continue
        key = ".".join((*path, name))
        line = f"{key_text(name)} = {value_text(masked(key, value))}"
        source = config.source(key) if config is not None else "default"
        yield line if source == "default" else f"{line}  # {source}"
    for name, value in inner.items():
        key = ".".join((*path, name))
        if value or key not in TABLES:
            yield from _table_lines(value, (*path, name), config)
