"""How sinks are built, what is refused before anything is lost, and the console line."""

import importlib.machinery
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.records import build_record, build_sink, build_validation_record, raises_key
from torchtitan.errors import ConfigError
from torchtitan.observe.sinks import (
    SINKS,
    Console,
    Jsonl,
    RunFiles,
    Sink,
    build_sinks,
    check_packages,
    console_line,
    validation_line,
)

COLOR = re.compile(r"\033\[[\d;]+m")


def test_importing_and_listing_needs_no_heavy_package() -> None:
    code = (
        "import sys; from torchtitan.observe.sinks import SINKS; [SINKS.options(name) for name in SINKS.names()];"
        "print({'torch', 'numpy', 'tensorboard', 'wandb'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_sinks_are_built_in_order_and_make_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    builders = {name: SINKS.bind(name, {}, key="metrics.sinks") for name in ("jsonl", "console")}
    sinks = build_sinks(builders, RunFiles(folder, 0))
    assert [type(sink) for sink in sinks] == [Jsonl, Console]
    assert (folder / "metrics.jsonl").read_bytes() == b""
    for sink in sinks:
        sink.close()


def test_a_sink_of_a_lab_is_built_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SINKS, "_items", {name: SINKS.get(name) for name in SINKS.names()})  # for this test alone
    seen: list[tuple[RunFiles, int]] = []

    def lab(run: RunFiles, *, every: int = 5) -> Sink:
        seen.append((run, every))
        return Console(color=False)

    SINKS.register("test-lab", lab)
    build_sink("test-lab", tmp_path, 7, every=3)
    assert seen == [(RunFiles(tmp_path, 7), 3)]
    with raises_key(r"metrics\.sink_args\.test-lab\.often"):
        build_sink("test-lab", tmp_path, often=1)


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with raises_key(r"job\.dump_folder"):
        build_sink(name, tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
@pytest.mark.parametrize("leftover", [False, True], ids=["nothing", "a folder of that name"])
def test_a_package_that_is_missing_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, leftover: bool
) -> None:
    found = importlib.machinery.ModuleSpec(name, None, is_package=True) if leftover else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: found)
    check_packages(["console", "jsonl"])
    for refused in (lambda: check_packages(["console", name]), lambda: build_sink(name, tmp_path)):
        with pytest.raises(ConfigError, match=f"^metrics.enable_{name}: .*pip install {name}"):
            refused()
    assert list(tmp_path.iterdir()) == []


# Console


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "step: 20  loss:  2.50000  grad_norm:  1.2500  memory: 40.00GiB(50.00%)  tps: 5,120  tflops: 10.24  "
            "mfu: 10.24%  time left: 0:00:32",
        ),
        (
            {"step": 1, "loss": 12.345678, "memory_gib": 0.5, "mfu": None, "tps": 1_234_567.8, "seconds_left": 7325.6},
            "step:  1  loss: 12.34568  grad_norm:  1.2500  memory:  0.50GiB(50.00%)  tps: 1,234,568  tflops: 10.24  "
            "mfu: N/A  time left: 2:02:06",
        ),
        (
            {"step": 12345, "loss": math.nan, "tflops": 1234.5, "seconds_left": 2 * 86400 + 59.6},
            "step: 12345  loss:      nan  grad_norm:  1.2500  memory: 40.00GiB(50.00%)  tps: 5,120  tflops: 1,234.50  "
            "mfu: 10.24%  time left: 2d 0:01:00",
        ),
    ],
    ids=["usual", "first", "long"],
)
def test_console_line(changes: dict[str, float | None], line: str) -> None:
    record = build_record(**changes)
    assert console_line(record, color=False) == line
    assert COLOR.sub("", console_line(record, color=True)) == line


def test_console_colors() -> None:
    # red, green, orange, turquoise, blue, cyan, magenta, and back to the terminal's own
    line = console_line(build_record(), color=True)
    colors = ["31", "32", "38;5;208", "38;5;80", "34", "36", "35", "39"]
    assert COLOR.findall(line) == [f"\033[{color}m" for color in colors]
    assert line.startswith("\033[31mstep: 20  \033[32mloss: ")


@pytest.mark.parametrize(
    ("name", "words"), [(None, ""), ("wiki", "  set: wiki")], ids=["the only set", "one of several"]
)
def test_line_of_validation(name: str | None, words: str) -> None:
    record = build_validation_record(set=name, tps=12_345.6)
    line = f"validate step: 20{words}  loss:  2.5000  memory: 40.00GiB(50.00%)  tps: 12,346"
    assert validation_line(record, color=False) == line
    colored = validation_line(record, color=True)
    assert colored.startswith("\033[33mvalidate step: 20") and colored.endswith("\033[39m")
    assert COLOR.sub("", colored) == line


class Terminal:
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "environment", "option", "colored"),
    [
        (True, {}, True, True),
        (True, {}, False, False),
        (True, {"NO_COLOR": "1"}, True, False),
        (False, {}, True, False),
        (False, {"FORCE_COLOR": "1"}, True, True),
        (False, {"FORCE_COLOR": "1"}, False, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_console_is_colored_when_it_is_wanted_and_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    terminal: bool,
    environment: dict[str, str],
    option: bool,
    colored: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        if terminal:
            patch.setattr(sys, "stderr", Terminal())
        sink = build_sink("console", tmp_path, color=option)
    sink.write(build_record())
    (message,) = log.messages
    assert bool(COLOR.search(message)) == colored
    assert list(tmp_path.iterdir()) == []
