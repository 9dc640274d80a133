"""The log: its format, and what is told once."""

import logging
import re
import sys
from collections.abc import Iterator

import pytest

from torchtitan import log


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    before = (log.logger.handlers[:], log.logger.level, log.logger.propagate, set(log._noted))
    yield
    log.logger.handlers[:], log.logger.propagate = before[0], before[2]
    log.logger.setLevel(before[1])
    log._noted.clear()
    log._noted.update(before[3])


@pytest.mark.parametrize("color", [True, False])
def test_a_line_is_as_torchtitan_prints_it(color: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log.init_logger(color)
    log.init_logger(color)
    log.logger.info("hello")
    log.logger.debug("not shown")
    log.logger.warning("careful")
    out, err = capsys.readouterr()
    assert out == ""
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(
        rf"\[titan\] {stamp} - root - INFO - hello\n\[titan\] {stamp} - root - WARNING - careful\n", err
    ), err


def test_a_terminal_shows_warnings_in_color(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    log.init_logger()
    log.logger.info("hello")
    log.logger.warning("careful")
    log.logger.error("broken")
    info, warning, error = capsys.readouterr().err.splitlines()
    assert "\033" not in info
    assert warning.startswith("\033[33m[titan]") and warning.endswith("careful\033[39m")
    assert error.startswith("\033[31m[titan]")
    log.init_logger(color=False)
    log.logger.warning("careful")
    monkeypatch.setenv("NO_COLOR", "1")
    log.init_logger()
    log.logger.warning("careful")
    assert "\033" not in capsys.readouterr().err


def test_ranks_log_alike(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    log.init_logger()
    log.logger.info("hello")
    assert capsys.readouterr().err.endswith(" - root - INFO - hello\n")


def test_a_note_is_told_once_by_rank_0(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log.logger.propagate = True
    monkeypatch.setenv("RANK", "1")
    log.note_once("from rank 1")
    monkeypatch.setenv("RANK", "0")
    log.note_once("from rank 0")
    log.note_once("from rank 0")
    monkeypatch.delenv("RANK")
    log.note_once("alone")
    assert [(record.message, record.levelno) for record in caplog.records] == [
        ("from rank 0", logging.WARNING),
        ("alone", logging.WARNING),
    ]
