"""What the keys are, for a person at a terminal: the help, and the explanation of one key or section.

The same as a page of documentation is in reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchtitan import __version__
from torchtitan.config.aliases import ALIASES, CONVERTER_NAMES, MEANINGLESS, older_spellings
from torchtitan.config.nearest import unknown_key
from torchtitan.config.options import Option, type_text
from torchtitan.config.parts import CHOICES, Choice, choices_in, offered, with_options
from torchtitan.config.schema import KEYS, SECTIONS, TABLES, JobConfig
from torchtitan.config.tables import TABLE_LISTS
from torchtitan.config.toml import value_text
from torchtitan.config.unbuilt import ABSENT, UNBUILT
from torchtitan.errors import UNKNOWN, ConfigError
from torchtitan.secrets import masked

_INTRODUCTION = f"""\
torchtitan {__version__}: train a language model

usage: python -m torchtitan.train [--job.config_file FILE] [--section.key VALUE ...]

--a.b VALUE or --a.b=VALUE; true-or-false keys also --a.b and --a.no_b; lists as a,b or as TOML, tables as TOML.
The command line beats the file, the file beats the default. --help shows this, --version the version.
More about one key: python -m torchtitan.config explain KEY
"""


def help_text() -> str:
    """Every key by section, with its meaning, type and default."""
    lines = [_INTRODUCTION]
    for section in SECTIONS:
        lines += [*_section_lines(section), ""]
    return "\n".join(lines).rstrip()


def explain(word: str, config: JobConfig) -> str:
    """What ``word``, a key or a section, means and is set to in ``config``; ConfigError where it is neither."""
    key = word.strip().removeprefix("--").replace("-", "_")
    if key in SECTIONS:
        return "\n".join(_section_lines(key, config))
    if key in ALIASES:
        return f"{key} is an older spelling of {ALIASES[key].key}\n{explain(ALIASES[key].key, config)}"
    if key in MEANINGLESS:
        return f"{key}\n  accepted, and changes nothing: {MEANINGLESS[key]}"
    option = KEYS.get(key) or _part_option(key, config)
    if option is not None:
        return "\n".join(_key_lines(key, option, config))
    if key in UNBUILT:
        row = UNBUILT[key]
        accepted = "" if row.off in (ABSENT, None) else f"\n  accepted:  {value_text(row.off)}, which asks for nothing"
        return f"{key}\n  {row.why}{accepted}"
    for choice in with_options():
        # The table of a converter is no section.
        if choice.many and (name := CONVERTER_NAMES.get(key, key)) in choice.registry.names():
            return "\n".join(_converter_lines(name, choice.options(name), config))
    if unbuilt := {row.why: None for name, row in UNBUILT.items() if name.startswith(f"{key}.")}:
        return "\n".join((f"[{key}]", *(f"  {why}" for why in unbuilt)))
    if table := next((table for table in TABLES if key.startswith(f"{table}.")), None):
        return explain(table, config)
    raise ConfigError(key, unknown_key(key))


def _section_lines(section: str, config: JobConfig | None = None) -> Iterator[str]:
    yield f"[{section}] {SECTIONS[section]}"
    choices = {choice.key: choice for choice in CHOICES if not choice.needs_torch}
    rows: list[tuple[str, Option, str, bool]] = []
    for key, option in KEYS.items():
        if key.rpartition(".")[0] == section:
            rows.append((key, option, "", True))
    for choice in choices_in(section):
        rows += _part_rows(choice, config)
    width = max(len(key) for key, *_ in rows) + 2
    for key, option, remark, chosen in rows:
        facts = f"{type_text(option.annotation)}, {default_text(option)}"
        if (named := choices.get(key)) is not None:
            facts += f"; known: {', '.join(named.registry.names()) or 'none'}"
        if chosen and config is not None and config.source(key) != "default":
            facts += f", now {_value_text(key, config)}"
        yield f"  --{key:<{width}}{option.doc} [{facts}]{remark}"


def _converter_lines(name: str, options: Mapping[str, Option], config: JobConfig) -> Iterator[str]:
    listed = name in config.model.converters
    yield f"[{name}] options of this converter, which is {'' if listed else 'not '}among model.converters"
    width = max(map(len, options), default=0) + len(name) + 3
    for option_name, option in options.items():
        key = f"{name}.{option_name}"
        facts = f"{type_text(option.annotation)}, {default_text(option)}"
        if listed and config.source(key) != "default":
            facts += f", now {_value_text(key, config)}"
        yield f"  --{key:<{width}}{option.doc} [{facts}]"


def _part_rows(choice: Choice, config: JobConfig | None) -> list[tuple[str, Option, str, bool]]:
    """Options of all parts of ``choice``, each with the names of the parts that take it, and whether ``config`` names
    one of them."""
    named = [] if config is None else config.value(choice.key)
    chosen = set(named if isinstance(named, list) else [named])
    return [(key, option, f" ({', '.join(of)})", bool(chosen & set(of))) for key, option, of in offered(choice)]


def _key_lines(key: str, option: Option, config: JobConfig) -> Iterator[str]:
    yield key
    if option.doc:
        yield f"  {option.doc}"
    yield f"  type:      {type_text(option.annotation)}"
    yield f"  default:   {default_text(option).removeprefix('default ')}"
    value = _value_text(key, config)
    if value is not None:
        yield f"  now:       {value}"
    for choice in CHOICES:
        if choice.key == key:
            yield f"  known:     {', '.join(choice.registry.names()) or 'none'}"
    for tables in TABLE_LISTS:
        if key == tables.key:
            width = max(map(len, tables.entries))
            for name, entry in tables.entries.items():
                facts = type_text(entry.annotation) + (", required" if entry.required else "")
                yield f"  {name + ':':<{width + 1}}  {entry.doc} [{facts}]"
            yield f"  {tables.remark}"
    if older := older_spellings(key):
        yield f"  formerly:  {', '.join(older)}"


def _part_option(key: str, config: JobConfig) -> Option | None:
    """The option called ``key``: that of a part which ``config`` names, else of any part."""
    found = [
        (choice, option, names) for choice in with_options() for other, option, names in offered(choice) if other == key
    ]
    for choice, option, names in found:
        named = config.value(choice.key)
        if set(names) & set(named if choice.many else [named]):
            return option
    return found[0][1] if found else None


def default_text(option: Option) -> str:
    """The default in words."""
    return "required" if option.required else f"default {value_text(option.default)}"


def _value_text(key: str, config: JobConfig | None) -> str | None:
    value = UNKNOWN if config is None else config.value(key)
    if value is UNKNOWN or config is None:
        return None
    return f"{value_text(masked(key, value))} ({config.source(key)})"
