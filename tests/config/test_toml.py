"""Writing values that read as the same."""

import math
from typing import Any

import pytest

from torchtitan.config.toml import key_text, literal, parse, value_text


@pytest.mark.parametrize(
    "value",
    [
        *(True, 5, -(2**70), 0.1, 1e-08, 5e-324, 1.7976931348623157e308, 1e16, math.inf, -math.inf, 3.0),
        *("", 'a"b\\c', "two\nlines\t\x00\x7f\x1b", "ß→🙂", [], [[1, 2], ["a"]], {}, {"a b": {"c.d": [1, {"": 2}]}}),
    ],
)
def test_round_trip(value: Any) -> None:
    text = value_text(value)
    assert "\n" not in text
    assert literal(text) == value
    assert type(literal(text)) is type(value)


@pytest.mark.parametrize("name", ["a", "a-b_1", "a.b", "", "ü", 'q"'])
def test_keys(name: str) -> None:
    assert parse(f"{key_text(name)} = 1") == {name: 1}


@pytest.mark.parametrize("text", ["", "a", "1, 2", "1\nb = 2", "1\n[b]", "[1"])
def test_no_literal(text: str) -> None:
    with pytest.raises(ValueError):
        literal(text)
