"""The resolved configuration as TOML that loads again to the same, with secrets masked.

Help and reference, which describe keys and not values, are in help.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.options import CommandLineText
from torchtitan.config.overrides import Path
from torchtitan.config.schema import TABLES, JobConfig
from torchtitan.config.toml import key_text, value_text

MASK = "***"
_SECRET_WORDS = {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials"}
_SECRET_NAMES = re.compile(r"(api|access|private|secret)_?key")
_SPECIAL_TOKENS = re.compile(r"(bos|eos|pad|unk|mask|sep|cls|special)_token")
_USER_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


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


def masked(key: str, value: Any) -> Any:
    """``value`` as it may be shown: what ``key`` calls a secret is hidden, and so are passwords in URLs."""
    if isinstance(value, Mapping):
        return {name: masked(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(key, inner) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    hidden = MASK if _is_secret(key) else _USER_IN_URL.sub(MASK, value)
    return CommandLineText(hidden) if isinstance(value, CommandLineText) else hidden


def _is_secret(key: str) -> bool:
    name = key.rpartition(".")[2].lower()
    if _SPECIAL_TOKENS.fullmatch(name):
        return False
    return bool(_SECRET_WORDS & set(name.split("_")) or _SECRET_NAMES.search(name))


def _table_lines(table: Mapping[str, Any], path: Path, config: JobConfig | None) -> Iterator[str]:
    entries = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    if path and (entries or not inner):
        yield f"\n[{'.'.join(map(key_text, path))}]"
    for name, value in entries.items():
        if value is None:
            continue
        key = ".".join((*path, name))
        line = f"{key_text(name)} = {value_text(masked(name, value))}"
        source = config.source(key) if config is not None else "default"
        yield line if source == "default" else f"{line}  # {source}"
    for name, value in inner.items():
        key = ".".join((*path, name))
        if value or key not in TABLES:
            yield from _table_lines(value, (*path, name), config)
