"""The training command: configuration → world → Trainer → run → tear down.

Nothing here knows what a step is.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan import __version__
from torchtitan.config import ConfigError, JobConfig, describe_error, help_text, load_config, to_toml
from torchtitan.errors import CheckpointError, LostProcessError
from torchtitan.log import init_logger, logger, read_in_part
from torchtitan.platforms import check_platform, check_processes
from torchtitan.resilience.end import BAD_CONFIG, DONE, FAILED, LAUNCHER, STOPPED, End
from torchtitan.resilience.folder import own_folder
from torchtitan.resilience.guard import StopRequest, die_when_signalled, ignore_signals
from torchtitan.secrets import hidden, hide_in_tracebacks

if TYPE_CHECKING:  # torch costs seconds, and a mistyped key is told before
    from torchtitan.resolve.job import Job


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--help" in argv or "-h" in argv:
        with read_in_part():
            print(help_text())
        return DONE
    if "--version" in argv:
        print(f"torchtitan {__version__}")
        return DONE
    config = None
    hide_in_tracebacks()
    try:
        check_platform()
        config = load_config(argv)
        init_logger(color=not config.metrics.disable_color_printing)
        return train(config)
    except ConfigError as error:
        print(describe_error(error, config), file=sys.stderr)
        return BAD_CONFIG


def train(config: JobConfig) -> int:
    """Run the job that ``config`` describes in the world that the launcher made; returns the exit code."""
    started = time.monotonic()
    die_when_signalled()
    from torchtitan.distributed.world import world_size
    from torchtitan.resolve.checkpoints import checkpoint_folders, finished_step
    from torchtitan.resolve.job import resolve_job

    check_processes(world_size())
    job = resolve_job(config, world_size())
    folder = Path(config.job.dump_folder)
    if (step := finished_step(config)) is not None:
        logger.info(
            f"nothing left to do: {folder} holds step {step}, and training.steps={config.training.steps}; raise it to "
            "go on, or choose another job.dump_folder (whether its files are sound was not looked at: "
            "python -m torchtitan.checkpoint verify)"
        )
        return DONE
    # A bucket is not asked for what the run does without.
    elsewhere = "://" in config.checkpoint.folder
    if not config.checkpoint.enable and not elsewhere and checkpoint_folders(config).steps():
        logger.warning(f"{folder} holds saved steps, which this run does not go on from: checkpoint.enable is false")
    # Before the process group: who may not write there must not say so there.
    with own_folders(config) if os.environ.get("RANK", "0") == "0" else nullcontext():
        return run(job, folder, started)


@contextmanager
def own_folders(config: JobConfig) -> Iterator[None]:
    """Keep other runs out of the run's folder, and out of that of its steps, which may lie elsewhere."""
    from torchtitan.checkpoint.places import is_local
    from torchtitan.resolve.checkpoints import checkpoint_folders

    folder = Path(config.job.dump_folder)
    with ExitStack() as held:
        held.enter_context(own_folder(folder))
        if config.checkpoint.enable and not config.checkpoint.load_only:
            steps = checkpoint_folders(config).root
            if is_local(steps) and not (steps.exists() and steps.samefile(folder)):
                held.enter_context(own_folder(Path(str(steps)), "checkpoint.folder"))
        yield


def run(job: Job, folder: Path, started: float) -> int:
    """Train ``job``, leaving in ``folder`` how it ended; returns the exit code."""
    from torchtitan.distributed.world import init_world, set_determinism
    from torchtitan.resolve.job import bound
    from torchtitan.trainers import TRAINERS

    config, debug = job.config, job.config.debug
    trainer = None
    try:
        with init_world(init_timeout_seconds=config.comm.init_timeout_seconds) as world:
            if world.rank == 0:
                End.forget(folder)
            world.barrier()
            set_determinism(debug.seed, deterministic=debug.deterministic, warn_only=debug.deterministic_warn_only)
            trainer = bound(TRAINERS, config.trainer, "trainer")(job, world)
            if not hasattr(trainer, "state"):
                raise ConfigError(
                    "trainer.name", f"{config.trainer.name!r} gives no torchtitan.trainer.Trainer that is set up"
                )
            # Only what has loaded is what the folder holds from now on.
            if world.rank == 0:
                write_config(folder, config)
            world.barrier()
            if config.checkpoint.enable and not (folder / "config.toml").exists():
                host = socket.gethostname()
                raise ConfigError("job.dump_folder", f"{folder} on {host} is not the one rank 0 writes to; share it")
            # Only now: until the first step there is nothing to save, and whoever wants to stop is obeyed at once.
            stop = StopRequest(config.job.max_duration_minutes, started)
            end = End("done", DONE) if trainer.run(stop) else End("stopped", STOPPED)
            trainer.close()
            reason = world.first(stop.reason)
            if world.rank == 0:
                why = f" after {reason}; the same command goes on" if reason else ""
                logger.info(f"{end.reason} at step {trainer.state.step}{why}")
                replace(end, step=trainer.state.step).write(folder)
        ignore_signals()
        return end.exit_code
    except BaseException as error:  # Ctrl-C too
        return fail(error, config, getattr(getattr(trainer, "state", None), "step", None))


def write_config(folder: Path, config: JobConfig) -> None:
    """Leave the resolved configuration in the run's folder."""
    text = to_toml(config)
    try:
        (folder / "config.toml").write_text(text)
    except OSError as error:
        raise ConfigError("job.dump_folder", f"cannot be written: {error}") from None
    if config.job.print_config:
        logger.info(f"the configuration:\n{text}")


def fail(error: BaseException, config: JobConfig, step: int | None) -> int:
    """Say what went wrong, once for all ranks; returns the exit code."""
    if isinstance(error, ConfigError):
        end = End("config", BAD_CONFIG, step, describe_error(error, config))
    elif isinstance(error, (CheckpointError, LostProcessError, ArithmeticError)):
        end = End("failed", FAILED, step, str(error))
    elif isinstance(error, KeyboardInterrupt):
        end = End("failed", FAILED, step, "interrupted before it could save")
    else:
        end = End("failed", FAILED, step, "".join(traceback.format_exception(error)) + _hint(error, config))
    end = replace(end, error=hidden(end.error or ""), rank=int(os.environ.get("RANK", "0")))
    left = end.write(Path(config.job.dump_folder))
    if left is False:
        logger.error(f"rank {end.rank} stops because another rank failed first")
    elif left is None or LAUNCHER not in os.environ:  # else it shows the error as the last thing on the screen
        print(end.error, file=sys.stderr, flush=True)
    return end.exit_code


def _hint(error: BaseException | None, config: JobConfig) -> str:
    """What stands behind an error that says only that something did not come in time; empty for any other."""
    while error is not None:
        # Not what a file system or a server of somebody's own says, which is an OSError.
        if isinstance(error, RuntimeError) and "timed out" in str(error).lower():
            comm = config.comm
            return (
                f"another rank did not answer within comm.train_timeout_seconds={comm.train_timeout_seconds} "
                f"(until the first step comm.init_timeout_seconds={comm.init_timeout_seconds}): it hangs, is much "
                "slower, or failed before; see what the other ranks wrote\n"
            )
        error = error.__cause__ or error.__context__
    return ""


def end_process_with(command: Callable[[], int]) -> None:
    """Run ``command`` and end this process with the code that it returns; what is registered for its end is done.

    The interpreter is not taken apart: a thread of gloo's that then lets go of a tensor would abort the process.
    """
    code = FAILED

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # the first, so the last to be called
    code = command()


if __name__ == "__main__":
    end_process_with(main)
