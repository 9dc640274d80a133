"""TOML in and out: reading a text, reading one value, writing one value.

Which keys there are is not known here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def parse(text: str) -> dict[str, Any]:
    """A whole file; ValueError says what is wrong and in which line."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def literal(text: str) -> Any:
    """One value as it would stand after ``key = ``; ValueError where it is none."""
    table = parse(f"value = {text}")
    if len(table) > 1:  # a line break can smuggle in a second key
        raise ValueError("more than one value")
    return table["value"]


def value_text(value: Any) -> str:
    """``value`` on one line, as TOML; what TOML cannot say (None) as ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key_text(k)} = {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence | set | frozenset):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return str(value)


def key_text(key: str) -> str:
    """One part of a key, quoted where it must be."""
    return key if _BARE_KEY.fullmatch(key) else value_text(key)
