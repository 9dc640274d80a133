"""``python -m torchtitan.checkpoint``: look into checkpoints, find damage, compare two.

What is shown is worked out in ``inspect/``: ``inventory.py``, ``verification.py`` and ``comparison.py``, and written
down in ``tables.py`` there.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

from torchtitan.command_line import Parser, told
from torchtitan.errors import ConfigError, one_line
from torchtitan.log import read_in_part
from torchtitan.platforms import check_platform

_COMMANDS = """\
list PATH [--all] [--config]                            which steps there are, or what one holds
verify PATH [--step N]                                  hold every file against the hashes written with it
compare A B [--rtol X] [--atol X] [--model-only]        in what the newest complete steps of two paths differ

Each takes --json, and has its own --help.

"""
_PATHS = """\
PATH is a run's folder, its checkpoint folder or one step's folder, on a file system or as a URL (s3://bucket/run), of a
run of ours or of TorchTitan's. Nothing is changed there, and nothing that lies there can run code.

Exit codes: 0 all is well; 1 damage was found, or the two differ; 2 there is no such thing, or the command is wrong."""


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        check_platform()
        with read_in_part():
            return int(arguments.act(arguments))
        return 0  # of who reads no further
    except ConfigError as error:
        return told(one_line(error), 2)
    except RuntimeError as error:
        from torchtitan.checkpoint.manifest import NewerFormat
        from torchtitan.errors import CheckpointError

        if not isinstance(error, CheckpointError):
            raise
        return told(one_line(error), 2 if isinstance(error, NewerFormat) else 1)
    except OSError as error:
        return told(one_line(error), 2)


def _list(arguments: argparse.Namespace) -> int:
    from torchtitan.checkpoint.inspect import tables
    from torchtitan.checkpoint.inspect.inventory import steps_at

    steps, single = steps_at(arguments.path)
    if (arguments.all or arguments.config) and not single:
        raise ConfigError(
            arguments.path, f"holds several steps; --all and --config want one, such as {steps[-1].folder}"
        )
    if arguments.json:
        found = tables.as_json(steps[0], inside=True) if single else [tables.as_json(step) for step in steps]
        print(tables.json_text(found))
    elif single:
        print("\n".join(tables.inside(steps[0], everything=arguments.all, config=arguments.config)))
    else:
        print("\n".join(tables.overview(steps)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from torchtitan.checkpoint.inspect import tables
    from torchtitan.checkpoint.inspect.inventory import COMPLETE, EXPORT, FOREIGN, steps_at
    from torchtitan.checkpoint.inspect.verification import verify

    steps, _ = steps_at(arguments.path)
    if arguments.step is not None:
        steps = [s for s in steps if s.number == arguments.step and s.folder.name == f"step-{arguments.step}"]
        if not steps:
            raise ConfigError(arguments.path, f"there is no step {arguments.step}")
    looked_at = [s for s in steps if s.state in (COMPLETE, EXPORT, FOREIGN, "superseded", "damaged")]
    if not looked_at:
        raise ConfigError(
            arguments.path, f"nothing to verify: {steps[0].note if len(steps) == 1 else 'no complete step'}"
        )
    total = sum(sum(step.files.values()) for step in looked_at if step.manifest is not None)
    with tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        verdicts = [verify(step, seen=bar.update) for step in looked_at]
    if arguments.json:
        print(tables.json_text([tables.verdict_as_json(verdict) for verdict in verdicts]))
    else:
        print("\n".join(tables.verdicts(verdicts, [step for step in steps if step not in looked_at])))
    return int(any(verdict.damage for verdict in verdicts))


def _compare(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from torchtitan.checkpoint.inspect import tables
    from torchtitan.checkpoint.inspect.comparison import compare
    from torchtitan.checkpoint.inspect.inventory import Step, newest, steps_at

    def step_at(path: str) -> Step:
        steps, single = steps_at(path)
        step = steps[0] if single else newest(steps)
        if step is None:
            raise ConfigError(path, "holds no complete step; name a step's folder")
        if step.reader is None:
            raise ConfigError(path, f"cannot be compared: {step.note}")
        return step

    first, second = step_at(arguments.a), step_at(arguments.b)
    tolerances = {"rtol": arguments.rtol, "atol": arguments.atol}
    with tqdm(desc="comparing", unit=" tensors", disable=None, leave=False) as bar:
        found = compare(first, second, **tolerances, model_only=arguments.model_only, seen=lambda name: bar.update())
    if arguments.json:
        print(tables.json_text(tables.comparison_as_json(first, second, found)))
    else:
        print("\n".join(tables.comparison(first, second, found)))
    return int(not found.equal)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m torchtitan.checkpoint",
        description="Look into checkpoints, find damage, compare two.",
        epilog=_COMMANDS + _PATHS,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|compare")

    def command(name: str, act: Any, what: str, *paths: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=_PATHS)
        for path in paths:
            added.add_argument(path, metavar=path.upper(), help="a run, its checkpoint folder, or a step")
        added.add_argument("--json", action="store_true", help="for machines")
        added.set_defaults(act=act)
        return added

    listing = command("list", _list, "the steps that are there, or what one step holds", "path")
    listing.add_argument("--all", action="store_true", help="of one step: optimizer states and values, one a line")
    listing.add_argument("--config", action="store_true", help="of one step: the configuration of its run as well")
    verifying = command("verify", _verify, "hold every file against the hashes written with it", "path")
    verifying.add_argument("--step", type=int, metavar="N", help="this step alone; default: every complete one")
    comparing = command("compare", _compare, "in what the newest complete steps of two paths differ", "a", "b")
    for name, of in (("--rtol", "relative, of the value in B"), ("--atol", "absolute")):
        comparing.add_argument(
            name, type=_tolerance, default=0.0, metavar="X", help=f"difference that is tolerated, {of} (0: none)"
        )
    comparing.add_argument("--model-only", action="store_true", help="weights alone: no optimizer, no numbers")
    return parser


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no tolerance: a number that is not negative")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
