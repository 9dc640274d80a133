"""Paths as people write them: ``~`` and ``~user`` are home folders.

What lies at a path does not belong here.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan.errors import ConfigError


def written_out(text: str) -> str:
    """``text`` with its home folder written out; ValueError where nobody knows that folder."""
    found = os.path.expanduser(text)
    if text.startswith("~") and found == text:
        whose = text.partition("/")[0]
        raise ValueError(f"there is no home folder {whose}; write it out, or a name that begins so as ./{whose}")
    return found


def local_path(text: str, key: str) -> Path:
    """The path that ``text`` means; ConfigError, on ``key``, as ``written_out``."""
    try:
        return Path(written_out(text))
    except ValueError as error:
        raise ConfigError(key, str(error)) from None
