"""On which operating systems what runs: Linux anything, macOS one process, Windows nothing; and what stops it.

Which devices there are is known in ``distributed/world.py`` and ``observe/device.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from torchtitan.errors import ConfigError

# By name: Windows lacks two of them, and is told of in words, not by this import.
SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if name in signal.Signals.__members__
)
"""What asks a run to stop."""


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_have_accelerators() -> bool:
    """Whether this machine has a device file of any that torch can compute on; which ones, only torch can tell."""
    names = ("nvidia*", "kfd", "dxg", "dri", "accel*", "davinci*", "habanalabs*")
    return any(found for name in names for found in Path("/dev").glob(name))


def check_platform() -> None:
    """ConfigError where nothing of the package can run."""
    if sys.platform in ("win32", "cygwin"):
        raise ConfigError(None, "Windows is not supported; use WSL 2 (wsl --install), which is Linux")


def check_processes(processes: int) -> None:
    """ConfigError where this system cannot run that many processes together."""
    if processes > 1 and sys.platform != "linux":
        raise ConfigError(
            None, f"{processes} processes need Linux; on {sys.platform} one can be run, without torchrun (NGPU=1)"
        )
