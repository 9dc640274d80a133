"""The reference page of the configuration, as Markdown: ``docs/config.md``.

It says what keys are, never what they are set to.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence

from torchtitan.config.aliases import ALIASES, MEANINGLESS
from torchtitan.config.help import default_text
from torchtitan.config.options import type_text
from torchtitan.config.parts import Choice, choices_in, offered
from torchtitan.config.schema import KEYS, SECTIONS
from torchtitan.config.tables import TABLE_LISTS, TableList
from torchtitan.config.toml import value_text
from torchtitan.config.unbuilt import ABSENT, UNBUILT

_INTRODUCTION = """\
# Configuration

Made by `python -m torchtitan.config reference`; a test compares it with the code.

A configuration is a TOML file (`--job.config_file FILE`) and keys on the command line, which beat the file, which beats
the defaults. On the command line a key is written `--section.key value` or `--section.key=value`; hyphen and underscore
are the same. Booleans are also written `--section.key` and `--section.no_key`, lists with commas or as TOML, tables as
TOML; `none` stands for no value where the type allows it. Values in a file are taken strictly: `"8"` is no number.

`python -m torchtitan.config print` shows a configuration as it is resolved, with the source of each value, `check` says
whether it could run, and `explain KEY` tells about one key. Each takes the same arguments as the training itself.
"""


def reference() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for section, meaning in SECTIONS.items():
        lines += [f"## `[{section}]`", "", f"{meaning}.", ""]
        keys = [(key, option) for key, option in KEYS.items() if key.rpartition(".")[0] == section]
        lines += _table(
            ("key", "type", "default", "meaning"),
            ((_code(key), _code(type_text(o.annotation)), _code(value_text(o.default)), o.doc) for key, o in keys),
        )
        for choice in choices_in(section):
            lines += _parts(choice)
        for tables in TABLE_LISTS:
            if tables.path[0] == section:
                lines += _tables(tables)
    lines += ["## Older spellings", "", "They still work, each with a note of the new name.", ""]
    lines += _table(
        ("older", "today"),
        (
            (_code(old), _code(alias.key) + (" (not built yet)" if alias.key in UNBUILT else ""))
            for old, alias in ALIASES.items()
        ),
    )
    lines += ["## Accepted without effect", ""]
    lines += _table(("key", "why"), ((_code(key), why) for key, why in MEANINGLESS.items()))
    lines += ["## Known, but not built yet", "", "Only the value that asks for nothing is accepted.", ""]
    lines += _table(
        ("key", "accepted", "why not more"),
        (
            (_code(key), "" if row.off in (None, ABSENT) else _code(value_text(row.off)), row.why)
            for key, row in UNBUILT.items()
        ),
    )
    return "\n".join(lines).rstrip() + "\n"


def _parts(choice: Choice) -> Iterator[str]:
    """The parts that come with the package, and their options."""
    names = choice.registry.names()
    ours = f"{', '.join(map(_code, names))}, or " if names else ""
    yield f"`{choice.key}`: {ours}the name of your own {choice.registry.kind}."
    yield ""
    for name in names:
        yield f"- {_code(name)}: {(inspect.getdoc(choice.registry.get(name)) or '').splitlines()[0].rstrip('.')}"
    if names:
        yield ""
    options = offered(choice)
    if not options:
        return
    yield from _table(
        ("key", "type", "default", "meaning", "of"),
        (
            (
                _code(key),
                _code(type_text(option.annotation)),
                _code(default_text(option).removeprefix("default ")),
                option.doc,
                ", ".join(map(_code, names)),
            )
            for key, option, names in options
        ),
    )


def _tables(tables: TableList) -> Iterator[str]:
    """What stands in a table of a list of them."""
    yield f"### `[[{tables.key}]]`"
    yield ""
    yield from _table(
        ("key", "type", "meaning"),
        ((_code(name), _code(type_text(entry.annotation)), entry.doc) for name, entry in tables.entries.items()),
    )
    yield tables.remark
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _code(text: str) -> str:
    return f"`{text}`"
