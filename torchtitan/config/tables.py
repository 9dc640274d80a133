"""Keys that hold a list of tables, each naming a registered part: ``[[optimizer.groups]]``, ``[[data.sources]]``.

What may stand in such a table, and its values read as the types they must have. What the parts do with it is in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from torchtitan.config.options import Option, nearest
from torchtitan.config.overrides import Path
from torchtitan.config.parts import Choice, offered
from torchtitan.config.section import PathText
from torchtitan.errors import ConfigError


@dataclass(frozen=True)
class TableList:
    """The tables of ``key``. ``entries`` is what one holds beside the options of its part, which its entry ``part``
    names; parts are those of the key ``choice``. ``each`` is the word for a table, ``remark`` what else there is to
    know, ``example`` what to write where something is missing."""

    key: str
    each: str
    part: str
    choice: str
    entries: Mapping[str, Option]
    remark: str
    example: str
    falls_back: bool = False
    """A table that names no part means the one that ``choice`` names; otherwise it must name one."""

    @property
    def path(self) -> Path:
        return tuple(self.key.split("."))

    def read(
        self, tables: Sequence[Mapping[str, Any]], choice: Choice, chosen: str, place: str
    ) -> list[dict[str, Any]]:
        """``tables`` with every value in its type; ConfigError, on ``key[i].…``, for the first that is wrong.

        ``chosen`` is the part that ``choice`` names, and ``place`` where the tables were written.
        """
        default = chosen if self.falls_back else None
        read = []
        for number, table in enumerate(tables):
            try:
                read.append(self._read_one(table, f"{self.key}[{number}]", choice, default))
            except ConfigError as error:
                error.source = place
                raise
        return read

    def _read_one(self, table: Mapping[str, Any], key: str, choice: Choice, default: str | None) -> dict[str, Any]:
        kind = choice.registry.kind
        part = table.get(self.part, default)
        if part is None:
            raise ConfigError(f"{key}.{self.part}", f"is missing; {self.example}")
        with _told(part):
            part = self.entries[self.part].read(part, key=f"{key}.{self.part}")
            known = {**self.entries, **choice.registry.options(part, key=f"{key}.{self.part}"), **self.entries}
        values = {}
        for entry, value in table.items():
            if entry not in known:
                raise ConfigError(f"{key}.{entry}", self._unknown(entry, key, choice, part, known))
            with _told(value):
                values[entry] = known[entry].read(value, key=f"{key}.{entry}")
        for option in known.values():
            if not option.required or option.name in table:
                continue
            if option.name in self.entries:
                raise ConfigError(f"{key}.{option.name}", f"is missing; {self.example}")
            if part != default:
                raise ConfigError(f"{key}.{option.name}", f"is missing; {kind} {part!r} has no default for it")
        return values

    def _unknown(self, entry: str, key: str, choice: Choice, part: str, known: Mapping[str, Option]) -> str:
        kind = choice.registry.kind
        owners = [owner for _, option, names in offered(choice) if option.name == entry for owner in names]
        if owners:
            return f"is no option of {kind} {part!r}, but of {', '.join(owners)}"
        if near := nearest(entry, known):
            return f"unknown key; did you mean {key}.{near}?"
        return f"unknown key; a {self.each} of {kind} {part!r} takes {', '.join(known)}"


@contextmanager
def _told(value: Any) -> Iterator[None]:
    """Say in an error that it is ``value`` that is wrong."""
    try:
        yield
    except ConfigError as error:
        error.value = value
        raise


def _label(text: str) -> str:
    """ValueError for what is no name in logs and metrics."""
    if not text or not text.isprintable() or set(text) & set("/\\ "):
        raise ValueError("must be a word of visible characters without / and \\")
    return text


def _entries(*options: Option) -> dict[str, Option]:
    return {option.name: option for option in options}


_DATASET = Option("dataset", str, doc="kind of data set", required=True)
_DATASET_PATH = Option("dataset_path", PathText | None, doc="its file, folder or glob")
_LABEL = Annotated[str, AfterValidator(_label)]

GROUPS = TableList(
    "optimizer.groups",
    each="group",
    part="name",
    choice="optimizer.name",
    entries=_entries(
        Option(
            "pattern",
            str | Annotated[list[str], Field(min_length=1)],
            doc="names of parameters, with * and ?; the first group that matches a parameter takes it",
            required=True,
        ),
        Option("lr", Annotated[float, Field(gt=0)], doc="peak learning rate; by default optimizer.lr"),
        Option("name", str, doc="optimizer; by default optimizer.name"),
    ),
    remark=(
        "Beside these, any option of the group's optimizer. What a group leaves out is that of [optimizer] where the "
        "optimizer is the same, else that optimizer's default. Parameters that no group matches belong to [optimizer]. "
        "In messages groups are counted from 0."
    ),
    example='name the parameters, as in pattern = "*norm.weight"',
    falls_back=True,
)

SOURCES = TableList(
    "data.sources",
    each="source",
    part="dataset",
    choice="training.dataset",
    entries=_entries(
        _DATASET,
        _DATASET_PATH,
        Option("weight", Annotated[float, Field(gt=0)], default=1.0, doc="its share of the rows; by default 1"),
        Option(
            "from_step",
            Annotated[int, Field(ge=1)],
            default=1,
            doc="step from which on the sources with this number are the blend, in place of those before; by default 1",
        ),
        Option("name", _LABEL, doc="what metrics call it; by default its file or folder, else the data set"),
    ),
    remark=(
        "Beside these, any option of the data set. Weights need not sum to 1. A source that comes again with a later "
        "from_step goes on where it stood. In messages sources are counted from 0."
    ),
    example='such as dataset = "jsonl"',
)

SETS = TableList(
    "validation.sets",
    each="set",
    part="dataset",
    choice="training.dataset",
    entries=_entries(_DATASET, _DATASET_PATH, Option("name", _LABEL, doc="what its loss is called", required=True)),
    remark="Beside these, any option of the data set. In messages sets are counted from 0.",
    example='such as name = "wiki", dataset = "jsonl"',
)

TABLE_LISTS = (GROUPS, SOURCES, SETS)
