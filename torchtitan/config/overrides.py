"""The command line: ``--section.key value`` and its other forms, as keys and texts.

Whether a key exists and what type it has is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan.config.options import CommandLineText
from torchtitan.errors import ConfigError
from torchtitan.secrets import masked

Path = tuple[str, ...]
"""A key in its parts. Not a dotted string: a part of a table's key may hold a dot itself."""


def parse_overrides(argv: Sequence[str]) -> list[tuple[Path, CommandLineText]]:
    """``--a.b value``, ``--a.b=value`` and bare ``--a.b``, in their order; ConfigError for any other word."""
    found: list[tuple[Path, CommandLineText]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            shown = masked(".".join(found[-1][0]), word) if found else word  # a password may have a blank in it
            raise ConfigError(None, f"unexpected word {shown!r} on the command line; write --section.key value")
        name, equals, text = word[2:].partition("=")
        if equals:
            value = CommandLineText(text)
        elif rest and not rest[0].startswith("--"):
            value = CommandLineText(rest.pop(0))
        else:
            value = CommandLineText("true", form="bare")
        found.append((tuple(name.replace("-", "_").split(".")), value))
    return found


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command that takes others as well, and overrides of a configuration, which have a dot in their
    name."""
    words: list[str] = []
    overrides: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            words.append(word)
            continue
        overrides.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return words, overrides


def without_negation(path: Path, text: CommandLineText) -> tuple[Path, CommandLineText] | None:
    """What ``--a.no_b`` says of ``a.b``; None where ``path`` is no such form."""
    if not path[-1].startswith("no_"):
        return None
    if text.form == "value":
        raise ConfigError(".".join(path), "takes no value")
    return (*path[:-1], path[-1].removeprefix("no_")), CommandLineText("false", form="negated")
