"""Which key was meant by one that nobody knows.

Names of registered parts are matched where they are registered.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from torchtitan.config.aliases import ALIASES
from torchtitan.config.options import nearest
from torchtitan.config.parts import choices_in, offered, with_options
from torchtitan.config.schema import KEYS, SECTIONS
from torchtitan.config.unbuilt import UNBUILT


def unknown_key(key: str, *, also: Iterable[str] = ()) -> str:
    """What to say of ``key``: the nearest key there is, else the keys of its section.

    ``also`` are options that its section takes besides those that the registries know of.
    """
    section = key.rpartition(".")[0]
    top = section.partition(".")[0]
    if key in SECTIONS:
        return f"is a section, not a key; its keys are {_listed(keys_of(key))}"
    if near := nearest_key(key, also=[f"{section}.{name}" for name in also]):
        return f"unknown key; did you mean {near}?"
    if top == "model":
        return "unknown key; hyper-parameters of the model are set in model.args"
    for table in (section, top):
        if keys := keys_of(table, also=also):
            return f"unknown key; [{table}] takes {_listed(keys)}"
    sections = _listed(name for name in SECTIONS if "." not in name)
    return f"unknown section; there are {sections}, and that of each name in model.converters"


def nearest_key(key: str, *, also: Iterable[str] = ()) -> str | None:
    """The key that was most likely meant: one of nearly that name, else one of that last name in another section."""
    options = [option_key for choice in with_options() if not choice.many for option_key, *_ in offered(choice)]
    built = [*KEYS, *also, *options]
    todays = {name: name for name in (*built, *UNBUILT)} | {old: alias.key for old, alias in ALIASES.items()}
    section, _, last = key.rpartition(".")

    def in_section(cutoff: float) -> str | None:
        near = nearest(last, [_last(name) for name in todays if name == f"{section}.{_last(name)}"], cutoff=cutoff)
        return todays[f"{section}.{near}"] if near else None

    def elsewhere(names: Iterable[str]) -> str | None:
        same = [name for name in names if _last(name) == last]
        return todays[max(same, key=lambda name: SequenceMatcher(None, name, key).ratio())] if same else None

    def anywhere() -> str | None:
        near = nearest(key, todays, cutoff=0.85) if section not in SECTIONS else None
        return todays[near] if near else None

    return in_section(0.8) or elsewhere(built) or elsewhere(todays) or in_section(0.6) or anywhere()


def keys_of(section: str, *, also: Iterable[str] = ()) -> list[str]:
    """Last names of the keys that may stand in ``section``, with those of ``also``."""
    keys = {_last(name) for name in KEYS if name.rpartition(".")[0] == section} | set(also)
    keys |= {
        option.name for choice in choices_in(section) if choice.table == section for _, option, _ in offered(choice)
    }
    return sorted(keys)


def begins_a_key(table: str) -> bool:
    """Whether an empty ``table`` is one in which keys could stand."""
    return any(known.startswith(f"{table}.") for known in (*KEYS, *UNBUILT, *ALIASES))


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
