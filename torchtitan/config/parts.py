"""The open choices: which key names a registered part, where the part's options stand, and which registry knows it.

Registries are named by strings and imported when asked, so that this room depends on none of theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.config.options import Option, type_text
from torchtitan.config.overrides import Path
from torchtitan.config.schema import KEYS
from torchtitan.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan.registry import Registry


@dataclass(frozen=True)
class Choice:
    """A key that names one part, or a list of them.

    ``table`` is where the options of a part stand, ``{name}`` in it being the part's name; None for parts that have
    none here. ``home`` is ``module:CONSTANT`` of the registry.
    """

    key: str
    table: str | None
    home: str
    needs_torch: bool = False
    instead: str | None = None
    """The list of tables that takes the place of this key, of its part and of all options."""

    @property
    def many(self) -> bool:
        return isinstance(KEYS[self.key].default, list)

    @property
    def registry(self) -> Registry[Any]:
        module, _, constant = self.home.partition(":")
        found: Registry[Any] = getattr(importlib.import_module(module), constant)
        return found

    def path(self, name: str) -> Path:
        """The table of the part called ``name``."""
        return tuple((self.table or "").format(name=name).split("."))

    def options(self, name: str) -> dict[str, Option]:
        """Options of the part called ``name``, less the keys that its section declares itself."""
        table = ".".join(self.path(name))
        options = self.registry.options(name, key=self.key).items()
        return {option: found for option, found in options if f"{table}.{option}" not in KEYS}


CHOICES = (
    Choice("model.name", None, "torchtitan.models.spec:MODELS", needs_torch=True),
    Choice("model.converters", "{name}", "torchtitan.transforms:CONVERTERS"),
    Choice("metrics.sinks", "metrics.sink_args.{name}", "torchtitan.observe.sinks:SINKS"),
    Choice("tokenizer.name", "tokenizer", "torchtitan.data.tokenizer:TOKENIZERS"),
    Choice("optimizer.name", "optimizer", "torchtitan.optim.optimizers:OPTIMIZERS"),
    Choice("lr_scheduler.name", "lr_scheduler", "torchtitan.optim.schedules:SCHEDULES"),
    Choice("loss.name", "loss", "torchtitan.loss.losses:LOSSES"),
    Choice("trainer.name", "trainer", "torchtitan.trainers:TRAINERS"),
    Choice("training.dataset", "data.args", "torchtitan.data.datasets:DATASETS", instead="data.sources"),
    Choice("validation.dataset", "validation.args", "torchtitan.data.datasets:DATASETS", instead="validation.sets"),
)


def with_options() -> Iterator[Choice]:
    """The choices whose parts have options in the configuration."""
    return (choice for choice in CHOICES if choice.table is not None)


def choices_in(section: str) -> list[Choice]:
    """The choices whose options are shown with the keys of ``section``."""
    return [
        choice
        for choice in with_options()
        if section in (choice.table, (choice.key if choice.many else choice.table or "").rpartition(".")[0])
    ]


def offered(choice: Choice) -> list[tuple[str, Option, list[str]]]:
    """Key and option of all that the parts of ``choice`` take, and the parts that take it in just this way."""
    found: dict[tuple[str, ...], tuple[str, Option, list[str]]] = {}
    for name in choice.registry.names():
        try:
            options = choice.options(name)
        except ConfigError:  # whoever names this part is told
            continue
        for option in options.values():
            key = ".".join((*choice.path(name), option.name))
            facts = (key, type_text(option.annotation), str(option.default), str(option.required), option.doc)
            found.setdefault(facts, (key, option, []))[2].append(name)
    places = {key: number for number, (key, *_) in reversed(list(enumerate(found.values())))}
    return sorted(found.values(), key=lambda entry: places[entry[0]])
