"""The log: lines as TorchTitan prints them, on every rank (torchrun shows those of ``LOG_RANK``).

What is measured each step goes through ``observe/``; this is for sentences.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from torchtitan.secrets import hidden

logger = logging.getLogger("titan")

# The name in the middle is the root logger's: dashboards that read TorchTitan's lines look for it.
_FORMAT = "[titan] %(asctime)s - root - %(levelname)s - %(message)s"
_YELLOW, _RED, _RESET = "\033[33m", "\033[31m", "\033[39m"
_noted: set[str] = set()


class _Plain(logging.Formatter):
    """Lines without secrets, whatever a message or an exception says."""

    def format(self, record: logging.LogRecord) -> str:
        return hidden(super().format(record))


class _Colored(_Plain):
    """Warnings yellow and errors red, so that they are found among thousands of lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if record.levelno < logging.WARNING:
            return line
        return f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{line}{_RESET}"


def init_logger(color: bool = True) -> None:
    """Send the log to standard error; called again it changes only the color.

    Only a terminal is colored, and not where NO_COLOR is set (no-color.org).
    """
    colored = color and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Colored if colored else _Plain)(_FORMAT))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def no_warnings(*names: str) -> Iterator[None]:
    """Within, nothing below an error from the loggers of these names, which are other packages'."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


@contextlib.contextmanager
def read_in_part() -> Iterator[None]:
    """Within, whoever reads what is printed may stop reading, as ``head`` does; what comes after it is not printed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note_once(message: str) -> None:
    """Warn of ``message`` once in this run: the first time, on rank 0."""
    if os.environ.get("RANK", "0") == "0" and message not in _noted:
        _noted.add(message)
        logger.warning(message)
