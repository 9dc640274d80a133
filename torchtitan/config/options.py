"""One option: its name, type, bounds, default and line of meaning, and how what was given is read as it.

Which options there are is said by the schema and by the builders' signatures; where values come from, in load.py.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from torchtitan.config.toml import literal
from torchtitan.errors import ConfigError

_MANY = (list, tuple, set, frozenset, Sequence, Set)
_TABLES = (dict, Mapping)
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_SENTENCES = {
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "bool": "must be true or false",
    "string": "must be text",
    "list": "must be a list",
    "tuple": "must be a list",
    "set": "must be a list",
    "dict": "must be a table",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} of them",
}


class CommandLineText(str):
    """A value as typed on the command line: its type is not known before its option is.

    ``form``: "value"; "bare" for ``--a.b`` with nothing after it; "negated" for ``--a.no_b``.
    """

    form: Literal["value", "bare", "negated"]

    def __new__(cls, text: str, form: Literal["value", "bare", "negated"] = "value") -> CommandLineText:
        self = super().__new__(cls, text)
        self.form = form
        return self


@dataclass(frozen=True)
class Option:
    """What may be set: ``annotation`` is any type pydantic knows, with bounds as ``Annotated[…, Field(…)]``."""

    name: str
    annotation: Any
    default: Any = None
    doc: str = ""
    required: bool = False

    def read(self, value: Any, *, key: str) -> Any:
        """``value`` in the option's type; ConfigError, naming ``key``, where it is not of that type or out of bounds.

        Values from a file are taken strictly ("8" is no number); text from the command line is read as the type asks.
        """
        if not isinstance(value, CommandLineText):
            return self._checked(value, key, strict=True)
        *tries, last = list(self._readings(value, key))
        for reading, strict in tries:
            try:
                return self._checked(reading, key, strict=strict)
            except ConfigError:
                continue
        reading, strict = last
        return self._checked(reading, key, strict=strict)

    def _readings(self, text: CommandLineText, key: str) -> Iterator[tuple[Any, bool]]:
        """The ways to read ``text``, best first, each with whether its types are certain."""
        arms = _arms(self.annotation)
        plain = [arm for arm in arms if arm is not type(None)]
        kinds = [get_origin(arm) or arm for arm in plain]
        if text.form != "value":
            if bool not in plain and Any not in plain:
                negated = "only a true-or-false key can be negated with no_"
                raise ConfigError(key, "a value is missing" if text.form == "bare" else negated)
            yield text.form == "bare", True
        elif len(plain) < len(arms) and text.lower() in ("none", "null"):
            yield None, True
        elif text[:1] in ("[", "{") and any(kind in _MANY + _TABLES for kind in kinds):
            try:
                yield literal(text), True
            except ValueError:
                raise ConfigError(key, f"is neither a TOML list nor a table; {_example(kinds)}") from None
        elif any(kind in _MANY for kind in kinds):
            yield [item.strip() for item in text.split(",")] if text.strip() else [], False
        elif any(kind in _TABLES for kind in kinds):
            raise ConfigError(key, f"must be a table; {_example(kinds)}")
        else:
            if kinds not in ([str], [int], [float], [bool]):
                with contextlib.suppress(ValueError):
                    yield literal(text.lower() if text in ("True", "False") else text), True
            yield str(text), plain == [Any]

    def _checked(self, value: Any, key: str, *, strict: bool) -> Any:
        adapter: TypeAdapter[Any] = TypeAdapter(self.annotation, config=ConfigDict(allow_inf_nan=False))
        try:
            if strict:  # through JSON, where a strict tuple may be written as a list, as it is in TOML
                return adapter.validate_json(to_json(value, inf_nan_mode="constants"), strict=True)
            return adapter.validate_python(value, strict=False)
        except ValidationError as error:
            raise ConfigError(key, self._problem(error, value)) from None

    def _problem(self, error: ValidationError, value: Any) -> str:
        errors = error.errors(include_url=False)
        if len([arm for arm in _arms(self.annotation) if arm is not type(None)]) < 2:
            errors = errors[:1]
        sentences: dict[str, None] = {}  # an ordered set
        for one in errors:
            context = {name: f"{v:g}" if isinstance(v, float) else v for name, v in one.get("ctx", {}).items()}
            kind = one["type"]
            item = next((part for part in one["loc"] if isinstance(part, int)), None)
            if kind in ("literal_error", "enum"):
                sentence = f"must be {_listed(allowed(self.annotation) or [context['expected']])}"
            elif kind == "value_error":
                sentence = str(context["error"])
            else:
                kind = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
                sentence = _SENTENCES[kind].format(**context) if kind in _SENTENCES else _must(one["msg"])
            sentences[sentence if item is None else f"item {item + 1} {sentence}"] = None
        first, *others = sentences
        problem = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
        if isinstance(value, str) and (near := nearest(value, map(str, allowed(self.annotation)))):
            problem += f"; did you mean {near}?"
        return problem


def option_from_annotation(name: str, annotation: Any, *, default: Any = None, required: bool = False) -> Option:
    """An option declared as ``Annotated[float, Field(ge=0, description="…")]``."""
    docs = [entry.description for entry in _metadata(annotation) if isinstance(entry, FieldInfo) and entry.description]
    return Option(name, annotation, default=default, doc=docs[-1] if docs else "", required=required)


def option_from_field(name: str, field: FieldInfo) -> Option:
    """An option declared as a field of a pydantic model."""
    annotated: Any = Annotated
    declared = (field.annotation, *field.metadata)
    annotation = annotated[declared] if field.metadata else field.annotation
    return Option(name, annotation, default=field.get_default(call_default_factory=True), doc=field.description or "")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``word`` most resembles, whatever its case; None where none is near."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def allowed(annotation: Any) -> list[Any]:
    """The values of a closed choice, an item's for a list of choices; empty where any value of the type may stand."""
    values: list[Any] = []
    for arm in _arms(annotation):
        if get_origin(arm) is Literal:
            values += get_args(arm)
        elif isinstance(arm, type) and issubclass(arm, enum.Enum):
            values += [member.value for member in arm]
        elif get_origin(arm) in _MANY:
            values += allowed(get_args(arm)[0])
    return values


def type_text(annotation: Any) -> str:
    """The type and its bounds in the words of the help: ``int >= 1``, ``float32 | bfloat16``, ``list of str``."""
    base = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    bounds = ", ".join(_bounds(annotation))
    origin = get_origin(base)
    if origin in (Union, types.UnionType):
        arms = [type_text(arm) for arm in get_args(base) if arm is not type(None)]
        none = ["none"] if type(None) in get_args(base) else []
        return " or ".join([" or ".join(arms) + (f" {bounds}" if bounds else ""), *none])
    if origin is Literal:
        text = " | ".join(str(value) for value in get_args(base))
    elif origin in _TABLES or base in _TABLES:
        text = "table"
    elif origin in _MANY:
        text = f"list of {type_text(get_args(base)[0])}"
    else:
        text = "any" if base is Any else getattr(base, "__name__", str(base))
    return f"{text} {bounds}" if bounds else text


def _arms(annotation: Any) -> list[Any]:
    """The members of a union, or the one type, without what is annotated on them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _arms(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [inner for arm in get_args(annotation) for inner in _arms(arm)]
    return [annotation]


def _metadata(annotation: Any) -> Sequence[Any]:
    """What is annotated on the type, the outermost last."""
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


def _bounds(annotation: Any) -> Iterator[str]:
    for entry in _metadata(annotation):
        for bound in entry.metadata if isinstance(entry, FieldInfo) else [entry]:
            for name, sign in _BOUNDS.items():
                if getattr(bound, name, None) is not None:
                    yield f"{sign} {getattr(bound, name)}"


def _listed(values: Sequence[Any]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _must(message: str) -> str:
    return re.sub(r"^\w+ should", "must", message)


def _example(kinds: Sequence[Any]) -> str:
    if any(kind in _TABLES for kind in kinds):
        return "write {name = value}"
    return 'write a,b or ["a", "b"]'
