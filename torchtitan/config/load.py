"""From a command line to a configuration, and from an error to the one line that a person reads.

Defaults are beaten by the file, the file by the command line. What needs the world or the model comes later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torchtitan.config.build import build_config
from torchtitan.config.options import CommandLineText
from torchtitan.config.overrides import Path, parse_overrides
from torchtitan.config.schema import KEYS, JobConfig
from torchtitan.config.sources import COMMAND_LINE, Settings, lay_over, leaves, read_file
from torchtitan.config.toml import value_text
from torchtitan.errors import UNKNOWN, ConfigError
from torchtitan.log import note_once
from torchtitan.secrets import MASK, hidden, hide, masked

_CONFIG_FILE = ("job", "config_file")
_LONGEST_VALUE = 80
_ENTRIES = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*(?:["']([^"']*)["']|([^\s,}\]]+))""")


def load_config(argv: Sequence[str]) -> JobConfig:
    """The configuration that the command line ``argv`` asks for; ConfigError for the first thing wrong with it.

    Imports the modules of ``job.imports``, and fills in the options of every part that the configuration names.
    """
    settings: Settings = {}
    notes: list[str] = []
    try:
        for name, text in os.environ.items():
            hide(name, text)
        overrides = parse_overrides(argv)
        _hide_secrets(overrides)
        lay_over(settings, [entry for entry in overrides if entry[0] == _CONFIG_FILE], COMMAND_LINE, notes)
        if _CONFIG_FILE in settings:
            file = KEYS["job.config_file"].read(settings[_CONFIG_FILE].value, key="job.config_file")
            content = {} if file is None else read_file(file)
            settings.clear()
            entries = list(leaves(content))
            _hide_secrets(entries)
            lay_over(settings, entries, str(file), notes)
            if _CONFIG_FILE in settings:
                raise ConfigError("job.config_file", "a file cannot name another; name it on the command line")
        lay_over(settings, overrides, COMMAND_LINE, notes)
        _refuse_masks(settings)
        config = build_config(settings, notes)
    except ConfigError as error:
        _locate(error, settings)
        raise
    for note in notes:
        note_once(note)
    return config


def describe_error(error: ConfigError, config: JobConfig | None = None) -> str:
    """One line: the key with its value and where it was written, what is wrong, and how many more keys are."""
    key, value, source = error.key, error.value, error.source
    if source is None and config is not None and key is not None:
        value = config.value(key)
        source = None if value is UNKNOWN else config.source(key)
    subject = key or ""
    if value is not UNKNOWN and value is not None and getattr(value, "form", "value") == "value":
        value = masked(subject, value)
        shown = hidden(value if isinstance(value, CommandLineText) else value_text(value))
        subject += f"={shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + '…'}"
    if source is not None:
        subject += f" ({source})"
    line = f"{subject}: {error.problem}" if subject else error.problem
    if error.more:
        line += f" (and {error.more} more)"
    return hidden(" ".join(line.split()))


def _hide_secrets(layer: Iterable[tuple[Path, Any]]) -> None:
    """Hide from now on, in all that is shown and written, the secrets of one source."""
    for path, value in layer:
        key = ".".join(path)
        hide(key, value)
        if isinstance(value, CommandLineText) and value[:1] in ("{", "["):
            for name, quoted, bare in _ENTRIES.findall(value):  # of a table that may not even be TOML
                hide(f"{key}.{name}", quoted or bare)


def _refuse_masks(settings: Settings) -> None:
    """ConfigError for a secret that was hidden where a run wrote its configuration, and is not given again."""
    for path, setting in settings.items():
        value = setting.value
        if isinstance(value, str) and (value == MASK or (MASK in value and ":/" in value)):
            raise ConfigError(".".join(path), "was hidden when this was written; give it again on the command line")


def _locate(error: ConfigError, settings: Settings) -> None:
    """Say in ``error`` what was written for its key, and where."""
    if error.source is not None or error.key is None:
        return
    for path, setting in settings.items():
        if ".".join(path) == error.key:
            error.value, error.source = setting.value, setting.place
