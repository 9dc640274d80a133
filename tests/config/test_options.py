"""Reading a value as the type of its option."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field

from torchtitan.config.options import CommandLineText, Option, nearest, option_from_annotation, type_text
from torchtitan.errors import ConfigError

Auto = Literal[-1] | Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1, description="a share")]


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "8", 8),
        (int, "-1", -1),
        (float, "8e-4", 8e-4),
        (float, "3", 3.0),
        (bool, "true", True),
        (bool, "False", False),
        (str, "8", "8"),
        (str, "[a]", "[a]"),
        (str, "none", "none"),
        (str | None, "none", None),
        (str | None, "None", None),
        (int | None, "4", 4),
        (Annotated[float | None, Field(gt=0)], "4", 4.0),
        (Auto, "-1", -1),
        (Auto, "16", 16),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Literal["1", "2"], "2", "2"),
        (float | str, "0.5", 0.5),
        (float | str, "half", "half"),
        (list[str], "a, b", ["a", "b"]),
        (list[str], "", []),
        (list[str], '["a,b", "c"]', ["a,b", "c"]),
        (list[str], "*norm.weight", ["*norm.weight"]),
        (list[int], "1,2", [1, 2]),
        (Sequence[float], "[1, 2.5]", [1, 2.5]),
        (tuple[float, float], "0.9,0.95", (0.9, 0.95)),
        (list[str] | None, "none", None),
        (dict[str, float], "{a = 1}", {"a": 1.0}),
        (Any, "4", 4),
        (Any, "1e-5", 1e-5),
        (Any, "word", "word"),
        (Any, "True", True),
        (Any, "{a = [1]}", {"a": [1]}),
        (Any, "1\nb = 2", "1\nb = 2"),
    ],
)
def test_text_is_read_as_the_type_asks(annotation: Any, text: str, value: Any) -> None:
    read = Option("x", annotation).read(CommandLineText(text), key="a.x")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("annotation", "value", "read"),
    [
        (int, 8, 8),
        (float, 8, 8.0),
        (tuple[float, float], [0.9, 1], (0.9, 1.0)),
        (list[str], ["a"], ["a"]),
        (int | None, None, None),
        (dict[str, Any], {"a": {"b": [1, 0.1]}}, {"a": {"b": [1, 0.1]}}),
        (Annotated[float, Field(allow_inf_nan=True)], float("inf"), float("inf")),
    ],
)
def test_values_of_a_file(annotation: Any, value: Any, read: Any) -> None:
    assert Option("x", annotation).read(value, key="a.x") == read


@pytest.mark.parametrize(
    ("annotation", "value", "problem"),
    [
        (int, "8", "must be a whole number"),
        (int, 8.0, "must be a whole number"),
        (int, True, "must be a whole number"),
        (int, CommandLineText("1e3"), "must be a whole number"),
        (float, "8", "must be a number"),
        (float, CommandLineText("abc"), "must be a number"),
        (float, float("nan"), "must be a finite number"),
        (float, CommandLineText("inf"), "must be a finite number"),
        (bool, 1, "must be true or false"),
        (bool, CommandLineText("maybe"), "must be true or false"),
        (str, 5, "must be text"),
        (list[str], "a", "must be a list"),
        (list[str], CommandLineText("[a"), 'is neither a TOML list nor a table; write a,b or ["a", "b"]'),
        (list[int], [1, "b", "c"], "item 2 must be a whole number"),
        (dict[str, Any], 3, "must be a table"),
        (dict[str, Any], CommandLineText("a=1"), "must be a table; write {name = value}"),
        (Share, 1.0, "must be less than 1"),
        (Share, CommandLineText("-0.5"), "must be at least 0"),
        (Annotated[float | None, Field(gt=0)], 0.0, "must be greater than 0"),
        (Auto, 0, "must be -1 or at least 1"),
        (Auto, CommandLineText("-5"), "must be -1 or at least 1"),
        (Auto, CommandLineText("x"), "must be -1 or a whole number"),
        (Literal["float32", "bfloat16"], "float16", "must be float32 or bfloat16; did you mean bfloat16?"),
        (Literal["a", "b", "c"], "zzz", "must be a, b or c"),
        (list[Literal["model", "optimizer"]], ["model", "optimiser"], "item 2 must be model or optimizer"),
        (Annotated[int, AfterValidator(even)], 3, "must be even"),
        (Annotated[list[str], Field(min_length=1)], [], "must have at least 1 of them"),
        (Annotated[str, Field(pattern="^a")], "b", "must match pattern '^a'"),
        (int, CommandLineText("true", form="bare"), "a value is missing"),
        (int, CommandLineText("false", form="negated"), "only a true-or-false key can be negated with no_"),
    ],
)
def test_refusals(annotation: Any, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Option("x", annotation).read(value, key="a.x")
    assert (caught.value.key, caught.value.problem) == ("a.x", problem)


@pytest.mark.parametrize("annotation", [bool, bool | None, Any])
def test_a_bare_flag_is_true(annotation: Any) -> None:
    assert Option("x", annotation).read(CommandLineText("true", form="bare"), key="a.x") is True
    assert Option("x", annotation).read(CommandLineText("false", form="negated"), key="a.x") is False


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (Share, "float >= 0, < 1"),
        (Annotated[Share, Field(description="with another line")], "float >= 0, < 1"),
        (Annotated[float | None, Field(gt=0)], "float > 0 or none"),
        (Auto, "-1 or int >= 1"),
        (Literal["a", "b"], "a | b"),
        (list[str], "list of str"),
        (tuple[float, float], "list of float"),
        (dict[str, Any], "table"),
        (list, "list"),
        (Any, "any"),
    ],
)
def test_types_in_words(annotation: Any, text: str) -> None:
    assert type_text(annotation) == text


def test_the_outer_description_counts() -> None:
    assert option_from_annotation("x", Share).doc == "a share"
    assert option_from_annotation("x", Annotated[Share, Field(description="of it")]).doc == "of it"


def test_nearest_ignores_case() -> None:
    assert nearest("adamw", ["Adam", "AdamW"]) == "AdamW"
    assert nearest("zebra", ["Adam", "AdamW"]) is None
