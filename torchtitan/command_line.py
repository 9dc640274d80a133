"""The parser of our commands' words: what is wrong with them is told in one line, with exit code 2.

Keys of the configuration are not its business (config/overrides.py).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Shows texts as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help says more\n")


def told(line: str, code: int) -> int:
    """Say ``line`` where errors are said; returns ``code``."""
    print(line, file=sys.stderr)
    return code
