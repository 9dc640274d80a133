"""Where values are written: the file and the command line, laid over each other under today's names.

What a value must be is not known here, save where an older spelling said it in another way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.config.aliases import ALIASES, DROP, MEANINGLESS
from torchtitan.config.options import CommandLineText, Option, nearest
from torchtitan.config.overrides import Path, without_negation
from torchtitan.config.presets import preset_file, preset_names
from torchtitan.config.schema import KEYS, TABLES
from torchtitan.config.toml import parse
from torchtitan.config.unbuilt import UNBUILT
from torchtitan.errors import ConfigError

COMMAND_LINE = "command line"
_FOREIGN = {
    ".yaml": "reading Nanotron's YAML",
    ".yml": "reading Nanotron's YAML",
    ".sh": "reading Megatron's arguments",
    ".args": "reading Megatron's arguments",
}


@dataclass(frozen=True)
class Setting:
    """A value, where it was written, and the older name it was written under."""

    value: Any
    source: str
    written_as: str | None = None

    @property
    def place(self) -> str:
        """The source in the words of an error."""
        return self.source if self.written_as is None else f"{self.source}, as {self.written_as}"


Settings = dict[Path, Setting]
"""Entries of tables one by one, so that the command line can change one of a table in the file."""


def read_file(name: str) -> dict[str, Any]:
    """The tables of a TOML file, or of the preset of that name where there is no such file; ConfigError says what is
    wrong with it and in which line."""
    key = "job.config_file"
    suffix = os.path.splitext(name)[1].lower()
    if suffix in _FOREIGN:
        raise ConfigError(key, f"{_FOREIGN[suffix]} is not built yet; write a .toml file")
    try:
        content = _content(name)
        return parse(content.decode("utf-8-sig"))
    except FileNotFoundError:
        place = "" if os.path.isabs(name) else f" in {os.getcwd()}"
        near = _similar_file(name) or nearest(os.path.splitext(os.path.basename(name))[0], preset_names())
        hint = f"; did you mean {near}?" if near else ";"
        presets = ", ".join(preset_names())
        raise ConfigError(key, f"no such file{place}, and no preset{hint} presets: {presets}") from None
    except OSError as error:
        raise ConfigError(key, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(key, f"is not UTF-8 text: byte 0x{content[error.start]:02x} in line {line}") from None
    except ValueError as error:
        raise ConfigError(key, f"is not TOML: {error}") from None


def leaves(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The entries of nested tables with their whole paths; an empty table is an entry itself."""
    for name, value in table.items():
        key = ".".join((*path, name))
        if "." in name and key in KEYS:
            raise ConfigError(key, "is written in quotes, which make it one name; write it without them")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def lay_over(settings: Settings, layer: Iterable[tuple[Path, Any]], source: str, notes: list[str]) -> None:
    """Add the values of one source, which beat those that are there; ``notes`` gets what to tell of older spellings."""
    spelled: dict[str, str] = {}
    for path, value in layer:
        try:
            path, value, spelling = _under_todays_name(path, value)
            key = ".".join(path)
            if value is DROP:
                continue
            if spelling != key:
                notes.append(f"{spelling} ({source}) is now called {key}")
            if spelled.setdefault(key, spelling) != spelling:
                one, other = sorted((spelled[key], spelling), key=lambda name: name == key)
                raise ConfigError(
                    one, f"is an older spelling of {key}, which is given as {other} too; keep one of them"
                )
            if key in TABLES and isinstance(value, CommandLineText):
                value = KEYS[key].read(value, key=key)
        except ConfigError as error:
            error.value, error.source = value, source
            raise
        entries = list(leaves(value, path)) if isinstance(value, dict) and value else [(path, value)]
        for entry, entry_value in entries:
            for other_entry in [known for known in settings if _overlap(known, entry)]:
                del settings[other_entry]
            settings[entry] = Setting(entry_value, source, None if spelling == key else spelling)


def is_known(key: str) -> bool:
    """Whether ``key`` has a meaning by itself, today, formerly or later."""
    return key in KEYS or key in ALIASES or key in UNBUILT or key in MEANINGLESS


def _under_todays_name(path: Path, value: Any) -> tuple[Path, Any, str]:
    """Path and value as they are written today, and the spelling that was used."""
    if isinstance(value, CommandLineText) and not is_known(".".join(path)):
        positive = without_negation(path, value)
        if positive is not None and is_known(".".join(positive[0])):
            path, value = positive
    spelling = ".".join(path)
    alias = ALIASES.get(spelling)
    if alias is None:
        return path, value, spelling
    if alias.convert is not None:
        value = alias.convert(Option(spelling, alias.type).read(value, key=spelling))
    return tuple(alias.key.split(".")), value, spelling


def _overlap(one: Path, other: Path) -> bool:
    """Whether setting one of them replaces the other: they are the same, or one stands inside the other."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _content(name: str) -> bytes:
    preset = preset_file(name)
    try:
        with open(name, "rb") as file:
            return file.read()
    except (FileNotFoundError, IsADirectoryError):
        if preset is None:
            raise
        return preset.read_bytes()


def _similar_file(name: str) -> str | None:
    folder, file = os.path.split(name)
    try:
        near = nearest(file, os.listdir(folder or "."))
    except OSError:
        return None
    return os.path.join(folder, near) if near else None
