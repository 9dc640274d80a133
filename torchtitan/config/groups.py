"""``[[optimizer.groups]]``: what may stand in a group of parameters, and its values read as the types they must have.

Which parameters a pattern matches is not known here; see ``optim/groups.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from torchtitan.config.options import Option, nearest
from torchtitan.config.overrides import Path
from torchtitan.config.parts import Choice, offered
from torchtitan.errors import ConfigError

GROUPS: Path = ("optimizer", "groups")

ENTRIES = {
    option.name: option
    for option in (
        Option(
            "pattern",
            str | Annotated[list[str], Field(min_length=1)],
            doc="names of parameters, with * and ?; the first group that matches a parameter takes it",
            required=True,
        ),
        Option("lr", Annotated[float, Field(gt=0)], doc="peak learning rate; by default optimizer.lr"),
        Option("name", str, doc="optimizer; by default optimizer.name"),
    )
}
"""What a group holds beside options of its optimizer."""

REMARK = (
    "Beside these, any option of the group's optimizer. What a group leaves out is that of [optimizer] where the "
    "optimizer is the same, else that optimizer's default. Parameters that no group matches belong to [optimizer]. "
    "In messages groups are counted from 0."
)


def read_groups(groups: Sequence[Mapping[str, Any]], choice: Choice, name: str, place: str) -> list[dict[str, Any]]:
    """``groups`` with every value in its type; ConfigError, on ``optimizer.groups[i].…``, for the first that is wrong.

    ``choice`` is that of the optimizer, ``name`` the one of ``[optimizer]``, and ``place`` where groups were written.
    """
    read = []
    for number, group in enumerate(groups):
        key = f"{'.'.join(GROUPS)}[{number}]"
        try:
            read.append(_read_group(group, key, choice, name))
        except ConfigError as error:
            error.source = place
            raise
    return read


def _read_group(group: Mapping[str, Any], key: str, choice: Choice, name: str) -> dict[str, Any]:
    optimizer, kind = group.get("name", name), choice.registry.kind
    with _told(optimizer):
        optimizer = ENTRIES["name"].read(optimizer, key=f"{key}.name")
        known = {**ENTRIES, **choice.registry.options(optimizer, key=f"{key}.name"), **ENTRIES}
    values = {}
    for entry, value in group.items():
        if entry not in known:
            raise ConfigError(f"{key}.{entry}", _unknown(entry, key, choice, optimizer, known))
        with _told(value):
            values[entry] = known[entry].read(value, key=f"{key}.{entry}")
    if "pattern" not in group:
        raise ConfigError(f"{key}.pattern", 'is missing; name the parameters, as in pattern = "*norm.weight"')
    for option in known.values():
        if option.required and option.name not in group and optimizer != name:
            raise ConfigError(f"{key}.{option.name}", f"is missing; {kind} {optimizer!r} has no default for it")
    return values


@contextmanager
def _told(value: Any) -> Iterator[None]:
    """Say in an error that it is ``value`` that is wrong."""
    try:
        yield
    except ConfigError as error:
        error.value = value
        raise


def _unknown(entry: str, key: str, choice: Choice, optimizer: str, known: Mapping[str, Option]) -> str:
    owners = [owner for _, option, names in offered(choice) if option.name == entry for owner in names]
    if owners:
        return f"is no option of {choice.registry.kind} {optimizer!r}, but of {', '.join(owners)}"
    if near := nearest(entry, known):
        return f"unknown key; did you mean {key}.{near}?"
    return f"unknown key; a group of {choice.registry.kind} {optimizer!r} takes {', '.join(known)}"
