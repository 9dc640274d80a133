"""Registries: parts by name, and the options that a part's signature offers to the configuration.

The parts themselves live in their rooms; what a user may call them is said there, beside the code.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast, overload

from torchtitan.config.options import Option, nearest, option_from_annotation
from torchtitan.errors import ConfigError

T = TypeVar("T")
U = TypeVar("U")


class Registry(Generic[T]):
    """Builders by name. Positional parameters of a builder are given by the code, keyword-only ones are its options.

    ``kind`` is the word for such a part in messages. ``home`` is the module whose import registers the built-in parts,
    or a package, of which every module is imported; either at the first look-up only. ``receives`` names what the code
    gives positionally (None: that is not checked).
    """

    def __init__(self, kind: str, home: str, *, receives: Sequence[str] | None = None) -> None:
        self.kind, self.home, self.receives = kind, home, receives
        self._items: dict[str, T] = {}
        self._at_home = False

    @overload
    def register(self, name: str) -> Callable[[U], U]: ...
    @overload
    def register(self, name: str, item: U) -> U: ...
    def register(self, name: str, item: Any = None) -> Any:
        """``REGISTRY.register("name", item)``, or a decorator ``@REGISTRY.register("name")``; ValueError if taken."""
        if item is None:
            return functools.partial(self.register, name)
        if name in self._items:
            raise ValueError(
                f"{self.kind} {name!r} is registered twice: by {_origin(self._items[name])} and {_origin(item)}"
            )
        self._items[name] = item
        return item

    def names(self) -> list[str]:
        """All names, sorted."""
        self._import_home()
        return sorted(self._items)

    def get(self, name: str, *, key: str | None = None) -> T:
        """The part called ``name``; ConfigError, on ``key``, with the nearest and all known names."""
        self._import_home()
        if name not in self._items:
            raise unknown_name(self.kind, name, self._items, key=key)
        return self._items[name]

    def options(self, name: str, *, key: str | None = None) -> dict[str, Option]:
        """What the configuration may set of the part called ``name``; ConfigError, on ``key``, where its signature is
        not that of such a part."""
        item = self.get(name, key=key)
        try:
            signature = inspect.signature(cast(Callable[..., Any], item))
            parameters = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
            if self.receives is not None:
                signature.bind(*self.receives, **{p.name: p.default for p in parameters})
                positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
                if extra := positional[len(self.receives) :]:
                    raise TypeError(f"{extra[0]} must be keyword-only to be an option (put * before it)")
            return {
                p.name: option_from_annotation(
                    p.name,
                    _annotation(item, p),
                    default=None if p.default is p.empty else p.default,
                    required=p.default is p.empty,
                )
                for p in parameters
            }
        except (TypeError, ValueError, NameError) as error:
            given = "" if self.receives is None else f"; it is called with ({', '.join(self.receives)})"
            raise ConfigError(key, f"{self.kind} {name!r}, {_origin(item)}, cannot be used: {error}{given}") from error

    def bind(self, name: str, options: Mapping[str, Any], *, key: str) -> functools.partial[Any]:
        """The part called ``name`` with ``options`` and the defaults of those that are not given.

        ConfigError, on ``key.option``, where one is unknown, missing, of another type or out of bounds.
        """
        known = self.options(name, key=key)
        for given in options:
            if given not in known:
                raise unknown_name(f"option of {self.kind} {name}:", given, known, key=f"{key}.{given}")
        values = {}
        for option in known.values():
            if option.name in options:
                values[option.name] = option.read(options[option.name], key=f"{key}.{option.name}")
            elif option.required:
                raise ConfigError(f"{key}.{option.name}", f"is missing; {self.kind} {name!r} has no default for it")
            else:
                values[option.name] = option.default
        return functools.partial(cast(Callable[..., Any], self.get(name)), **values)

    def _import_home(self) -> None:
        if self._at_home:
            return
        self._at_home = True  # set first: a module of the home may look something up while it is imported
        try:
            home = importlib.import_module(self.home)
            for module in pkgutil.iter_modules(getattr(home, "__path__", ())):
                if not module.name.startswith("_"):
                    importlib.import_module(f"{self.home}.{module.name}")
        except BaseException:
            self._at_home = False
            raise


def unknown_name(kind: str, name: str, known: Iterable[str], *, key: str | None) -> ConfigError:
    """The error for a name that is not among ``known``, with the nearest one and all of them."""
    known = sorted(known)
    near = nearest(name, known)
    hint = f"; did you mean {near}?" if near else ";"
    return ConfigError(key, f"unknown {kind} {name!r}{hint} known: {', '.join(known) or 'none'}")


def _annotation(item: Any, parameter: inspect.Parameter) -> Any:
    """The parameter's annotation as an object. Only this one is evaluated: others may name types that need torch."""
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    function = inspect.unwrap(item.func if isinstance(item, functools.partial) else item)
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]
    elif not hasattr(function, "__globals__"):
        function = type(function).__call__
    namespace = getattr(function, "__globals__", None) or vars(sys.modules[function.__module__])
    return eval(parameter.annotation, namespace)


def _origin(item: Any) -> str:
    name = getattr(item, "__qualname__", None) or f"a {type(item).__qualname__}"
    return f"{getattr(item, '__module__', '?')}.{name}"
