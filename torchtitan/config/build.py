"""From what was written to the configuration: values in their keys' types, no key unknown, options of parts filled in.

Where the values come from is in sources.py, and what the keys are in schema.py.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchtitan.config.aliases import CONVERTER_NAMES, MEANINGLESS
from torchtitan.config.nearest import begins_a_key, unknown_key
from torchtitan.config.options import CommandLineText, Option, allowed
from torchtitan.config.overrides import Path, without_negation
from torchtitan.config.parts import Choice, offered, with_options
from torchtitan.config.schema import KEYS, SECTIONS, JobConfig
from torchtitan.config.sources import COMMAND_LINE, Setting, Settings
from torchtitan.config.tables import TABLE_LISTS
from torchtitan.config.together import check_together, waiting
from torchtitan.config.unbuilt import UNBUILT, refuse_unbuilt_choice
from torchtitan.errors import ConfigError

_ANY = Option("", Any)
_TABLE = Option("", dict[str, Any])
_REMOTE_CODE = "trust_remote_code"
_CONVERTERS = ("model", "converters")


def build_config(settings: Settings, notes: list[str]) -> JobConfig:
    """The configuration that ``settings`` say; ConfigError for the first of them that is wrong, counting the others.

    What to tell of keys that change nothing goes to ``notes``.
    """
    _refuse_remote_code(settings)
    problems = _Problems(settings)
    values = _declared(settings, problems)
    _rename_converters(values, notes)
    chosen = _chosen(values)
    _check_undeclared(settings, chosen, values, problems, notes)
    problems.raise_first()
    _import(_config(values).job.imports)
    for choice, name in chosen:
        with problems.collect(_path(choice.key)):
            try:
                known = choice.options(name)
            except ConfigError:
                refuse_unbuilt_choice(choice.key, name, instead=choice.registry.names())
                raise
            settings = _without_negations(settings, choice.path(name), known)
            if choice.instead is not None and values.get(_path(choice.instead)):
                _refuse_options(settings, choice.path(name), choice.instead, problems)
            else:
                values |= _options(settings, choice, name, known, problems, notes)
            for tables in TABLE_LISTS:
                if tables.choice == choice.key and tables.path in values:
                    place = settings[tables.path].place
                    values[tables.path] = tables.read(values[tables.path], choice, name, place)
    problems.raise_first()
    config = _config(values)
    config._sources.update({".".join(path): setting.source for path, setting in settings.items()})
    _pass_over_waiting(config, notes)
    return config


def _pass_over_waiting(config: JobConfig, notes: list[str]) -> None:
    """A file may keep keys for the day when what they belong to is turned on; nobody types them for that."""
    for key, switch in waiting(config):
        if config.source(key) == COMMAND_LINE:
            raise ConfigError(key, f"changes nothing without {switch}; set that, or leave this out")
        notes.append(f"{key} ({config.source(key)}) changes nothing without {switch}")


def _refuse_remote_code(settings: Settings) -> None:
    """ConfigError where the word stands anywhere, in the name of a key or in a table."""
    for path, setting in settings.items():
        words = (*path, *_names_in(setting.value))
        if any(word.replace("-", "_").lower() == _REMOTE_CODE for word in words):
            raise ConfigError(
                ".".join(path),
                f"{_REMOTE_CODE} is refused, whatever it is set to: no code that comes with weights or data is ever "
                "run; leave it out, and name modules that you have read in job.imports",
            )


def _names_in(value: Any) -> Iterator[str]:
    """Names in tables, however deep; of a table on the command line whatever could be one."""
    if isinstance(value, CommandLineText) and value[:1] in ("{", "["):
        yield from re.findall(r"[\w-]+", value)
    elif isinstance(value, Mapping):
        yield from value
        yield from (name for inner in value.values() for name in _names_in(inner))
    elif isinstance(value, list):
        yield from (name for inner in value for name in _names_in(inner))


class _Problems:
    """Everything found wrong so far; what was written first is told first."""

    def __init__(self, settings: Settings) -> None:
        self._order = {path: number for number, path in enumerate(settings)}
        self._found: list[tuple[int, ConfigError]] = []

    @contextmanager
    def collect(self, path: Path, setting: Setting | None = None) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            if setting is not None and error.source is None:
                error.value, error.source = setting.value, setting.place
            self._found.append((self._order.get(path, len(self._order)), error))

    def raise_first(self) -> None:
        if self._found:
            _, first = min(self._found, key=lambda entry: entry[0])
            first.more = len(self._found) - 1
            raise first


def _declared(settings: Settings, problems: _Problems) -> dict[Path, Any]:
    """Values of the keys that the schema declares."""
    values = {}
    for path, setting in settings.items():
        key = ".".join(path)
        if key in KEYS:
            with problems.collect(path):
                try:
                    values[path] = KEYS[key].read(setting.value, key=key)
                except ConfigError:
                    refuse_unbuilt_choice(key, setting.value, instead=allowed(KEYS[key].annotation))
                    raise
    return values


def _rename_converters(values: dict[Path, Any], notes: list[str]) -> None:
    names = values.get(_CONVERTERS, [])
    for old in CONVERTER_NAMES.keys() & set(names):
        notes.append(f"{old} in model.converters is now called {CONVERTER_NAMES[old]}")
    if names:
        values[_CONVERTERS] = [CONVERTER_NAMES.get(name, name) for name in names]


def _chosen(values: dict[Path, Any]) -> list[tuple[Choice, str]]:
    """The parts that the configuration names, one after the other."""
    chosen = []
    for choice in with_options():
        named = values.get(_path(choice.key), KEYS[choice.key].default)
        chosen += [(choice, name) for name in (named if choice.many else [named])]
    return chosen


def _check_undeclared(
    settings: Settings,
    chosen: Sequence[tuple[Choice, str]],
    values: dict[Path, Any],
    problems: _Problems,
    notes: list[str],
) -> None:
    """Sort out what the schema does not declare: hyper-parameters go into ``values``, options of parts are left for
    later, and the rest is refused, but for what asks for nothing."""
    option_tables = [choice.path(name) for choice, name in chosen]
    for path, setting in settings.items():
        key = ".".join(path)
        is_option = any(_within(path, table) for table in option_tables)
        is_whole_table = path in option_tables and key not in SECTIONS
        is_empty_table = setting.value == {} and begins_a_key(key)
        if key in KEYS or is_option or is_whole_table or is_empty_table:
            continue
        with problems.collect(path):
            if _within(path, ("model", "args")):
                values[path] = _ANY.read(setting.value, key=key)
            elif _within(path, ("metrics", "sink_args")):
                raise ConfigError(key, f"{path[2]} is not in metrics.sinks; add it there")
            elif key in MEANINGLESS:
                notes.append(_changes_nothing(key, setting))
            elif converter := _converter_of(path):
                _pass_over(converter, key, setting, notes)
            elif key in UNBUILT:
                _refuse_or_pass_over(key, setting, notes)
            else:
                raise _unknown_key(key, setting)


def _refuse_or_pass_over(key: str, setting: Setting, notes: list[str]) -> None:
    """What is not built is refused, but for what a file keeps beside a switch that is off."""
    unbuilt = UNBUILT[key]
    try:
        unbuilt.refuse_unless_off(setting.value, key=key)
    except ConfigError:
        # A switch that is on is refused itself.
        if setting.source == COMMAND_LINE or not unbuilt.switches:
            raise
        notes.append(f"{key} ({setting.source}) changes nothing without {' or '.join(unbuilt.switches)}")


def _changes_nothing(key: str, setting: Setting) -> str:
    return f"{key} ({setting.source}) changes nothing: {MEANINGLESS[key]}"


def _converter_of(path: Path) -> str | None:
    """The converter that comes with the package in whose table ``path`` lies."""
    return next((name for name in _converters().registry.names() if _within(path, _converters().path(name))), None)


def _converters() -> Choice:
    return next(choice for choice in with_options() if _path(choice.key) == _CONVERTERS)


def _pass_over(converter: str, key: str, setting: Setting, notes: list[str]) -> None:
    """An option of a ``converter`` that is not asked for: a file may keep it for the day when it is."""
    options = _converters().options(converter)
    option = options.get(key.removeprefix(f"{converter}."))
    if option is None:
        raise _unknown_key(key, setting, also=options)
    if setting.source == COMMAND_LINE:
        raise ConfigError(key, f"{converter} is not in model.converters; add it there")
    option.read(setting.value, key=key)
    notes.append(f"{key} ({setting.source}) changes nothing: {converter} is not in model.converters")


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError("job.imports", f"cannot import {module}: {type(error).__name__}: {error}") from error


def _options(
    settings: Settings, choice: Choice, name: str, known: dict[str, Option], problems: _Problems, notes: list[str]
) -> dict[Path, Any]:
    """Values of all options of the part called ``name``. A file's options of the part that the command line replaces
    go with it."""
    named = settings.get(_path(choice.key))
    replaced = named is not None and named.source == COMMAND_LINE and not choice.many
    table = choice.path(name)
    place = ("converter_args", name) if choice.key == "model.converters" else table
    values = {(*place, option.name): option.default for option in known.values() if not option.required}
    for option_name, (path, setting) in _given(settings, table).items():
        key = ".".join((*table, option_name))
        value_path = (*place, option_name)
        with problems.collect(path, setting):
            if key in KEYS:  # a table where something else should stand
                KEYS[key].read(setting.value, key=key)
            elif option_name in known:
                values[value_path] = known[option_name].read(setting.value, key=key)
            elif key in MEANINGLESS:
                notes.append(_changes_nothing(key, setting))
            elif key in UNBUILT:
                _refuse_or_pass_over(key, setting, notes)
            elif owners := [owner for other, _, names in offered(choice) if other == key for owner in names]:
                if replaced and setting.source != COMMAND_LINE:
                    notes.append(f"{key} ({setting.source}) is left out: it is an option of {', '.join(owners)}")
                    continue
                raise ConfigError(key, f"is no option of {choice.registry.kind} {name!r}, but of {', '.join(owners)}")
            else:
                raise _unknown_key(key, setting, also=known)
    for option in known.values():
        if option.required and (*place, option.name) not in values:
            key = ".".join((*table, option.name))
            with problems.collect((*table, option.name)):
                raise ConfigError(key, f"is missing; {choice.registry.kind} {name!r} has no default for it")
    return values


def _refuse_options(settings: Settings, table: Path, instead: str, problems: _Problems) -> None:
    for option, (path, setting) in _given(settings, table).items():
        with problems.collect(path, setting):
            key = ".".join((*table, option))
            raise ConfigError(key, f"{instead} names the data sets; let this stand in the table of the one it is for")


def _given(settings: Settings, table: Path) -> dict[str, tuple[Path, Setting]]:
    """The entries of ``table`` that no key declares, tables within it put together again."""
    found: dict[str, tuple[Path, Setting]] = {}
    for path, setting in settings.items():
        key = ".".join(path)
        if path == table and key not in {*KEYS, *SECTIONS}:  # the whole table in one, from the command line
            whole = _TABLE.read(setting.value, key=key)
            found |= {name: (path, Setting(value, setting.source)) for name, value in whole.items()}
        if not _within(path, table) or key in KEYS:
            continue
        name, *inner = path[len(table) :]
        if not inner:
            found[name] = path, setting
        else:
            _, entries = found.setdefault(name, (path, Setting({}, setting.source)))
            _place(entries.value, inner, _ANY.read(setting.value, key=key))
    return found


def _without_negations(settings: Settings, table: Path, known: dict[str, Option]) -> Settings:
    """``settings`` with each ``no_option`` of ``table`` written as ``option`` = false."""
    positive: Settings = {}
    for path, setting in settings.items():
        if _within(path, table) and path[-1] not in known and isinstance(setting.value, CommandLineText):
            negated = without_negation(path, setting.value)
            if negated is not None and negated[0][-1] in known:
                path, setting = negated[0], Setting(negated[1], setting.source)
        positive.pop(path, None)
        positive[path] = setting
    return positive


def _config(values: dict[Path, Any]) -> JobConfig:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        _place(tree, path, value)
    config = JobConfig.model_validate(tree)
    check_together(config)
    return config


def _unknown_key(key: str, setting: Setting, *, also: Iterable[str] = ()) -> ConfigError:
    error = ConfigError(key, unknown_key(key, also=also))
    error.source = setting.place  # and no value: it is the key that is wrong
    return error


def _place(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *tables, last = path
    for table in tables:
        tree = tree.setdefault(table, {})
    tree[last] = value


def _within(path: Path, table: Path) -> bool:
    return len(path) > len(table) and path[: len(table)] == table


def _path(key: str) -> Path:
    return tuple(key.split("."))
