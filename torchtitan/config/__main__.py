"""``python -m torchtitan.config``: look at a configuration without running it.

What is printed is made in render.py, help.py and reference.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchtitan.command_line import Parser
from torchtitan.config.help import explain
from torchtitan.config.load import describe_error, load_config
from torchtitan.config.reference import reference
from torchtitan.config.render import to_toml
from torchtitan.config.schema import JobConfig
from torchtitan.errors import ConfigError
from torchtitan.platforms import check_platform

_EPILOG = """\
print [OVERRIDES]          the resolved configuration, with the source of each value that is no default
check [OVERRIDES]          everything that can be checked before a run, for WORLD_SIZE or NGPU ranks (default 1)
explain KEY [OVERRIDES]    a key or a section: meaning, type, default, value
reference                  the reference page, as Markdown

OVERRIDES: --job.config_file FILE and --section.key VALUE, as for training
"""


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for; returns the exit code."""
    parser = Parser(
        prog="python -m torchtitan.config",
        description="Look at a configuration without running it.",
        epilog=_EPILOG,
    )
    names = ("print", "check", "explain", "reference")
    parser.add_argument("command", choices=names, metavar="|".join(names))
    parser.add_argument("arguments", nargs="*", default=[], help="see below")
    command = parser.parse_args(argv[:1]).command
    arguments = list(argv[1:])
    config: JobConfig | None = None
    try:
        check_platform()
        if command == "reference":
            if arguments:
                raise ConfigError(None, "reference takes no arguments")
            print(reference(), end="")
            return 0
        word = None
        if command == "explain":
            if not arguments or arguments[0].startswith("--"):
                raise ConfigError(None, "explain what? write explain KEY, such as explain training.steps")
            word = arguments.pop(0)
        config = load_config(arguments)
        if word is not None:
            print(explain(word, config))
        elif command == "print":
            print(to_toml(config, sources=True), end="")
        else:
            print(check(config))
        return 0
    except ConfigError as error:
        print(describe_error(error, config), file=sys.stderr)
        return 2


def check(config: JobConfig) -> str:
    """One line on what would run; ConfigError for what could not."""
    name = next((name for name in ("WORLD_SIZE", "NGPU") if name in os.environ), None)
    text = os.environ[name] if name else "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(None, f"{name}={text} in the environment is no number of ranks")
    from torchtitan.resolve.job import resolve_job  # needs torch

    job = resolve_job(config, int(text))
    ranks = "1 rank" if int(text) == 1 else f"{int(text)} ranks"
    tokenizer = "" if job.tokenizer is None else f", tokenizer {job.tokenizer.name}"
    return f"OK: {config.model.name} {config.model.flavor}, {config.training.steps} steps on {ranks}{tokenizer}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
