"""A module of somebody else's parts, written where ``job.imports`` can find it, and files to configure with."""

from collections.abc import Callable
from pathlib import Path

import pytest

LAB = """
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated, Literal
from pydantic import Field
from torchtitan.observe.sinks import SINKS
from torchtitan.optim.optimizers import OPTIMIZERS
from torchtitan.transforms import CONVERTERS
if TYPE_CHECKING:
    from nowhere import Optimizer

@OPTIMIZERS.register("Lion")
def lion(
    groups: Optimizer,
    *,
    rank: Annotated[int, Field(ge=1, description="rank of the update")],
    lr: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.99),
    momentum: float | None = 0.9,
    nesterov: bool = False,
    kind: Literal["plain", "cautious"] = "plain",
    scales: dict[str, float] = {},
) -> Optimizer: ...

@CONVERTERS.register("lab.prune")
def prune(*, share: float = 0.5, names: list[str] = []): ...

@SINKS.register("mail")
def mail(run, *, to: str, api_key: str = ""): ...
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that registers an optimizer, a converter and a sink; they are gone after the test."""
    (tmp_path / "lab_parts.py").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    return "lab_parts"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Write ``job.toml`` and get the arguments that name it."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes, name: str = "job.toml") -> list[str]:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return ["--job.config_file", name]

    return write
