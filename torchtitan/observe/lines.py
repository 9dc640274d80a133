"""Files of JSON lines, each of one step: appended in whole lines, cut where a run goes on, kept where another begins.

What stands in a line is decided in ``metrics.py``; which files there are, in ``sinks.py``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan.log import logger


class JsonLines:
    """Appends lines to a file that holds no step after ``resumed_step``, and only whole lines.

    It is made by ``open``, or with its first line. A number that is not finite (JSON has none) is null.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        if resumed_step == 0:
            keep_earlier(path)
        cut_lines(path, resumed_step)
        self._path = path
        self._file: FileIO | None = None

    def open(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self._path, "a")
        return self._file

    def append(self, record: Mapping[str, Any]) -> None:
        """Write ``record`` as a line; OSError leaves the file as it was."""
        file = self.open()
        line = memoryview(json.dumps({name: _finite(value) for name, value in record.items()}).encode() + b"\n")
        start = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(start)  # half a line would spoil the next one
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def keep_earlier(path: Path) -> None:
    """Rename the lines of an earlier run, which this one does not continue, after the time they were written."""
    if path.exists() and path.stat().st_size:
        written = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
        earlier = path.with_stem(f"{path.stem}-{written}")
        path.rename(earlier)
        logger.info(f"{path.name} is that of an earlier run; it is called {earlier.name} now")


def cut_lines(path: Path, last_step: int) -> None:
    """Take out of a file of JSON lines those of steps after ``last_step`` and those that are torn, in one rename."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and (step := _step(line)) is not None and step <= last_step]
    if len(kept) == len(lines):
        return
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(b"".join(kept))
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    logger.info(f"{path.name}: cut {len(lines) - len(kept)} lines that are torn or of steps after {last_step}")


def _step(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
