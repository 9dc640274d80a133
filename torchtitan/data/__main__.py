"""``python -m torchtitan.data``: look at data, and make it ready.

Each command is a module of commands/, which has ``add_arguments(parser)`` and ``run(arguments, overrides)``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from torchtitan.command_line import Parser, told
from torchtitan.config import describe_error
from torchtitan.config.overrides import split_overrides
from torchtitan.data import commands
from torchtitan.errors import ConfigError, one_line
from torchtitan.log import init_logger, read_in_part
from torchtitan.platforms import check_platform

_EPILOG = """\
The configuration is given as for training: --job.config_file FILE and --section.key VALUE.

exit codes: 0 done, 1 failed, 2 wrong command or input"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit code."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    init_logger()
    try:
        check_platform()
        with read_in_part():
            return int(arguments.run(arguments, overrides))
        return 0  # of who reads no further
    except ConfigError as error:
        return told(describe_error(error), 2)
    except OSError as error:
        return told(f"failed: {one_line(error)}", 1)
    except KeyboardInterrupt:
        return told("interrupted", 1)


def _parser() -> Parser:
    modules = {
        name: _command(name) for name in sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
    }
    parser = Parser(
        prog="python -m torchtitan.data",
        description="Look at data, and make it ready.",
        epilog="\n".join(f"{name:10}{_what(module)}" for name, module in modules.items())
        + "\n\nEach has its own --help.\n"
        + _EPILOG,
        allow_abbrev=False,
    )
    added = parser.add_subparsers(dest="command", required=True, metavar="|".join(modules))
    for name, module in modules.items():
        command = added.add_parser(name, description=_what(module), epilog=_EPILOG, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"{commands.__name__}.{name}")


def _what(module: ModuleType) -> str:
    """What follows the command's name in the first line of its module."""
    return (inspect.getdoc(module) or "").partition("\n")[0].partition(": ")[2]


if __name__ == "__main__":
    sys.exit(main())
