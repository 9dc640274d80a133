"""The errors that a person can mend: by changing the configuration, or by looking after a checkpoint.

How they are printed is in ``config/load.py`` and ``train.py``; bugs and broken machines raise other errors.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

UNKNOWN: Any = object()
"""Stands where an error does not say the value; None is a value."""


class ConfigError(ValueError):
    """``key`` is what to change (``optimizer.beta1``), None where no key is to blame; ``problem`` says what and how.

    ``value`` and ``source`` are filled in by who knows them; ``more`` counts the other keys that are wrong as well.
    """

    def __init__(self, key: str | None, problem: str) -> None:
        super().__init__(key, problem)
        self.key, self.problem = key, problem
        self.value: Any = UNKNOWN
        self.source: str | None = None
        self.more = 0

    def __str__(self) -> str:
        return self.problem if self.key is None else f"{self.key}: {self.problem}"


@contextmanager
def keys_told_as(names: Mapping[str, str], who: str = "") -> Iterator[None]:
    """A ConfigError of a key in ``names``, or of one below it, tells the name that stands there, and so does what it
    says: for parts that know themselves under one key and are asked for under another. One of a key that is not theirs
    alone says ``who``."""
    try:
        yield
    except ConfigError as error:
        for own, name in names.items():
            error.problem = re.sub(rf"(?<![\w.]){re.escape(own)}(?!\w)", name, error.problem)
        for own, name in names.items():
            if error.key is not None and (error.key == own or error.key.startswith(f"{own}.")):
                error.key = name + error.key.removeprefix(own)
                break
        else:
            if who and not error.problem.startswith(f"{who}: "):
                error.problem = f"{who}: {error.problem}"
        raise


def divisors(*numbers: int) -> str:
    """What divides all of ``numbers``, to be named as remedies; the smallest few of many."""
    common = math.gcd(*numbers)
    found = (d for d in range(1, min(common, 1 << 16) + 1) if common % d == 0)
    return ", ".join(str(d) for d in itertools.islice(found, 24))


class LostProcessError(RuntimeError):
    """A process that a run needs has ended: which, how, and what usually ends one so."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or could not be written: which, why, and what to do."""


def brief(text: str) -> str:
    """``text`` of a stranger on one line of an error."""
    line = text if text.isprintable() else " ".join(ascii(text)[1:-1].split())
    return line if len(line) <= 100 else f"{line[:99]}…"


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names that strangers gave, as many as an error can show, or "none"."""
    told = list(names)
    more = f" and {len(told) - most:,} more" if len(told) > most else ""
    return f"{', '.join(map(brief, told[:most])) or 'none'}{more}"


def one_line(error: BaseException) -> str:
    """What an error says, in one line; what a terminal would obey is left out."""
    return "".join(c for c in " ".join(str(error).split()) if c.isprintable()) or type(error).__name__
