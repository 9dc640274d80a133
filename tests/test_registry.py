"""Registries: names, homes, and options bound by signature."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import Field

from torchtitan.config.options import CommandLineText
from torchtitan.errors import ConfigError
from torchtitan.registry import Registry, unknown_name

if TYPE_CHECKING:
    from nowhere import Heavy  # type: ignore[import-not-found]

HOME = "torchtitan.errors"  # a module that registers nothing

Share = Annotated[float, Field(ge=0, lt=1, description="a share")]


def adam(params: Heavy, *, beta: Share = 0.9, kind: Literal["a", "b"] = "a", steps: int | None = None) -> Heavy:
    return params, beta, kind, steps


def needy(*, size: Annotated[int, Field(ge=1)], plain=3):  # type: ignore[no-untyped-def]
    return size, plain


@dataclass(frozen=True, kw_only=True)
class Data:
    pair: tuple[float, float] = (0.0, 1.0)


class Callable_:
    def __call__(self, x: Heavy, *, y: int = 2) -> Heavy:
        return x, y


@pytest.fixture
def parts() -> Registry[Callable[..., Any]]:
    registry: Registry[Callable[..., Any]] = Registry("part", home=HOME)
    registry.register("Adam", adam)
    registry.register("Needy")(needy)
    registry.register("data", Data)
    registry.register("callable", Callable_())
    registry.register("partial", functools.partial(adam, beta=0.5))
    return registry


def test_names_and_get(parts: Registry[Any]) -> None:
    assert parts.names() == ["Adam", "Needy", "callable", "data", "partial"]
    assert parts.get("Adam") is adam
    with pytest.raises(ConfigError) as caught:
        parts.get("adma", key="part.name")
    assert str(caught.value) == (
        "part.name: unknown part 'adma'; did you mean Adam? known: Adam, Needy, callable, data, partial"
    )


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(ConfigError, match="unknown part 'x'; known: none"):
        Registry("part", home=HOME).get("x")


def test_a_name_is_taken_once(parts: Registry[Any]) -> None:
    with pytest.raises(ValueError, match=r"part 'Adam' is registered twice: by .*\.adam and .*\.needy"):
        parts.register("Adam", needy)
    assert parts.get("Adam") is adam


def test_options_are_the_keyword_only_parameters(parts: Registry[Any]) -> None:
    options = parts.options("Adam")
    assert list(options) == ["beta", "kind", "steps"]
    assert (options["beta"].default, options["beta"].doc, options["beta"].required) == (0.9, "a share", False)
    assert parts.options("Needy")["size"].required
    assert parts.options("Needy")["plain"].annotation is Any
    assert parts.options("data")["pair"].annotation == tuple[float, float]
    assert parts.options("callable")["y"].annotation is int
    assert parts.options("partial")["beta"].default == 0.5


def test_bind_gives_all_options(parts: Registry[Any]) -> None:
    bound = parts.bind("Adam", {"beta": CommandLineText("0.5")}, key="part")
    assert bound.keywords == {"beta": 0.5, "kind": "a", "steps": None}
    assert bound("p") == ("p", 0.5, "a", None)
    assert parts.bind("data", {"pair": [1, 2]}, key="part")() == Data(pair=(1.0, 2.0))
    assert parts.bind("callable", {"y": 5}, key="part")("x") == ("x", 5)
    assert parts.bind("partial", {}, key="part")("x") == ("x", 0.5, "a", None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Adam", {"be": 0}, "part.be: unknown option of part Adam: 'be'; did you mean beta? known: beta, kind, steps"),
        ("Adam", {"params": 0.5}, "part.params: unknown option of part Adam: 'params'; known: beta, kind, steps"),
        ("Adam", {"beta": "0.5"}, "part.beta: must be a number"),
        ("Adam", {"beta": 1}, "part.beta: must be less than 1"),
        ("Adam", {"kind": "c"}, "part.kind: must be a or b"),
        ("Needy", {}, "part.size: is missing; part 'Needy' has no default for it"),
        ("nobody", {}, "part: unknown part 'nobody'; known: Adam, Needy, callable, data, partial"),
    ],
)  # fmt: skip
def test_bind_refuses(parts: Registry[Any], name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts.bind(name, options, key="part")
    assert str(caught.value) == message


def test_a_home_is_imported_at_the_first_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "home_of_parts"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from torchtitan.registry import Registry\nPARTS = Registry('part', home=__name__)\n"
    )
    register = "from home_of_parts import PARTS\n@PARTS.register('{0}')\ndef {0}(): return PARTS.names()\n"
    (package / "one.py").write_text(register.format("one") + "assert 'one' in PARTS.names()\n")
    (package / "two.py").write_text(register.format("two"))
    (package / "__main__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import home_of_parts  # type: ignore[import-not-found]

        assert "home_of_parts.one" not in sys.modules
        assert home_of_parts.PARTS.names() == ["one", "two"]
        assert home_of_parts.PARTS.get("one")() == ["one", "two"]
    finally:
        for name in [name for name in sys.modules if name.startswith("home_of_parts")]:
            del sys.modules[name]


def test_a_home_that_fails_says_so_each_time() -> None:
    registry: Registry[Any] = Registry("part", home="no_such_home")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            registry.names()


def test_unknown_name_of_anything() -> None:
    error = unknown_name("flavor", "8b", ["8B", "70B"], key="model.flavor")
    assert str(error) == "model.flavor: unknown flavor '8b'; did you mean 8B? known: 70B, 8B"


def test_errors_survive_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a.b", "is wrong")))
    assert (str(error), error.key, error.problem) == ("a.b: is wrong", "a.b", "is wrong")


def _with_unknown_type(*, size: NoSuchType = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        (lambda logits, labels: None, "too many positional|missing a required argument"),
        ("no function", "is not a callable"),
        (_with_unknown_type, "NoSuchType"),
        (lambda share=0.5: None, r"share must be keyword-only to be an option \(put \* before it\)"),
    ],
)
def test_a_part_of_another_shape_is_told_with_its_name(builder: Any, said: str) -> None:
    registry: Registry[Any] = Registry("loss", home="torchtitan.errors", receives=())
    registry.register("odd", builder)
    with pytest.raises(ConfigError, match=rf"loss\.name: loss 'odd', .*({said})"):
        registry.options("odd", key="loss.name")
