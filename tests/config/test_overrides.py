"""The grammar of the command line."""

import pytest

from torchtitan.config.options import CommandLineText
from torchtitan.config.overrides import parse_overrides, without_negation
from torchtitan.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "parsed"),
    [
        (["--a.b", "5"], [(("a", "b"), "5", "value")]),
        (["--a.b=5"], [(("a", "b"), "5", "value")]),
        (["--a.b="], [(("a", "b"), "", "value")]),
        (["--a.b=x=y"], [(("a", "b"), "x=y", "value")]),
        (["--a.b", "-1"], [(("a", "b"), "-1", "value")]),
        (["--a.b=--c"], [(("a", "b"), "--c", "value")]),
        (["--a.b-c.d-e", "f-g"], [(("a", "b_c", "d_e"), "f-g", "value")]),
        (["--a.b"], [(("a", "b"), "true", "bare")]),
        (["--a.b", "--c.d", "1"], [(("a", "b"), "true", "bare"), (("c", "d"), "1", "value")]),
        (["--a.b", "1", "--a.b", "2"], [(("a", "b"), "1", "value"), (("a", "b"), "2", "value")]),
        ([], []),
    ],
)
def test_forms(argv: list[str], parsed: list[tuple[tuple[str, ...], str, str]]) -> None:
    assert [(path, str(text), text.form) for path, text in parse_overrides(argv)] == parsed


@pytest.mark.parametrize("argv", [["a.b=5"], ["--a.b", "5", "6"], ["-a", "5"], ["--", "5"], ["--a.b=5", "6"]])
def test_stray_words_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="unexpected word"):
        parse_overrides(argv)


def test_negation() -> None:
    bare = CommandLineText("true", form="bare")
    assert without_negation(("a", "no_b"), bare) == (("a", "b"), "false")
    assert without_negation(("a", "b"), bare) is None
    with pytest.raises(ConfigError, match="takes no value"):
        without_negation(("a", "no_b"), CommandLineText("true"))
