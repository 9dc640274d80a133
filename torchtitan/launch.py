"""The launcher that run_train.sh is: checks the configuration, starts the run here, returns the run's exit code.

Several machines are started by torchrun or a scheduler directly; nothing here trains.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torchtitan.allocator import settings, usual_places
from torchtitan.config import ConfigError, describe_error, load_config
from torchtitan.config.presets import DEFAULT
from torchtitan.log import init_logger, logger
from torchtitan.platforms import SIGNALS, check_platform, check_processes, cores, may_have_accelerators
from torchtitan.resilience.end import BAD_CONFIG, DONE, FAILED, LAUNCHER, STOPPED, End
from torchtitan.secrets import hide_in_tracebacks
from torchtitan.train import main as train_main

_MOST_PROCESSES = 1024
_stopped: list[int] = []
"""Signals that were passed on to the workers."""


def main(argv: Sequence[str]) -> int:
    """Launch the command line; returns the exit code that the run wrote into its folder.

    Without a file on it, that of the environment's CONFIG_FILE, else the debug model's.
    """
    if {"--help", "-h", "--version"} & set(argv):
        return train_main(argv)
    argv = ["--job.config_file", os.environ.get("CONFIG_FILE") or DEFAULT, *argv]  # the last one counts
    for number in SIGNALS:
        signal.signal(number, _stop)
    hide_in_tracebacks()
    init_logger()
    logger.setLevel(logging.ERROR)  # what there is to note, the run notes itself
    config = None
    try:
        check_platform()
        config = load_config(argv)
        processes = _processes()
        check_processes(processes)
        shown = _shown_ranks(processes)
        if processes > 1:  # a run of one tells it as well as this process
            # Imported late: a mistyped key is told in a fraction of a second.
            from torchtitan.resolve.job import resolve_job

            resolve_job(config, processes)
    except ConfigError as error:
        print(describe_error(error, config), file=sys.stderr)
        return BAD_CONFIG
    if sys.platform != "linux":  # torchrun and what forwards signals to workers lean on /proc
        return train_main(argv)
    _set_environment(processes)
    started = time.time()
    failed = _torchrun(processes, shown, argv) if processes > 1 else _one_process(argv)
    return _ended(Path(config.job.dump_folder), started, failed) if failed else DONE


def _processes() -> int:
    if mode := os.environ.get("COMM_MODE"):
        raise ConfigError(None, f"COMM_MODE={mode} is not built yet; unset it")
    text = os.environ.get("NGPU")
    if text is None:
        if sys.platform != "linux" or not may_have_accelerators():
            return 1
        import torch

        return torch.accelerator.device_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_PROCESSES:
        raise ConfigError(None, f"NGPU={text} must be a number of processes of this machine, 1 to {_MOST_PROCESSES}")
    return int(text)


def _shown_ranks(processes: int) -> str:
    text = os.environ.get("LOG_RANK", "0")
    if not all(rank.isdecimal() and int(rank) < processes for rank in text.split(",")):
        raise ConfigError(None, f"LOG_RANK={text} must be ranks below {processes}, comma-separated")
    return text


def _set_environment(processes: int) -> None:
    """What the processes of a run start with, unless the user says otherwise."""
    os.environ[LAUNCHER] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    if may_have_accelerators():
        import torch

        if torch.cuda.is_available():
            return
    os.environ.update(settings(os.environ, usual_places()))


def _one_process(argv: Sequence[str]) -> dict[int, int]:
    """Without torchrun, which would import torch here before it starts what imports it again."""
    for number in SIGNALS:
        signal.signal(number, _forward)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # A torchrun around this one speaks to its own workers.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    ended = subprocess.run([sys.executable, "-m", "torchtitan.train", *argv], env=inherited | place, check=False)
    return {0: ended.returncode} if ended.returncode else {}


def _torchrun(processes: int, shown: str, argv: Sequence[str]) -> dict[int, int]:
    """Returns the exit codes of the ranks that failed, the first one first."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if sys.stderr.isatty():
        os.environ.setdefault("FORCE_COLOR", "1")  # workers write into a pipe
    options = {
        "--nproc_per_node": str(processes),
        "--rdzv_backend": "c10d",
        "--rdzv_endpoint": "localhost:0",
        "--local-ranks-filter": shown,
        "--role": "rank",
        "--tee": "3",
        # What asks a run to stop is passed on by _forward: the agent itself would kill workers that are still saving.
        "--signals-to-handle": "SIGQUIT",
    }
    # How the run ended is said in one line, and by the run itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for number in SIGNALS:
        signal.signal(number, _forward)
    try:
        torchrun([word for pair in options.items() for word in pair] + ["-m", "torchtitan.train", *argv])
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        return {first: failure.exitcode} | {rank: other.exitcode for rank, other in error.failures.items()}
    return {}


def _ended(folder: Path, started: float, failed: dict[int, int]) -> int:
    """Say, as the last thing on the screen, why a run ended whose ranks ``failed`` with these exit codes."""
    end = End.read(folder, since=started)
    # torchrun kills whoever has not ended half a minute after the first failure: a victim, not the cause.
    torn_down = end is not None and End.read(folder, since=time.time() - 25) is None
    for rank, code in failed.items():
        if code < 0 and -code not in SIGNALS and not torn_down:
            name = signal.Signals(-code).name
            hint = " (by the system, if memory ran out)" if -code == signal.SIGKILL else ""
            killed = End("failed", FAILED, end.step if end else None, f"killed by {name}{hint}", rank)
            End.forget(folder)  # another rank had missed this one, and said so
            killed.write(folder)
            print(f"rank {rank} was {killed.error}", file=sys.stderr)
            return FAILED
    if end is None:
        rank, code = next(iter(failed.items()))
        if stopped := _stopped or [-code] * (-code in SIGNALS):  # all was asked to stop, or the first rank that ended
            name = signal.Signals(stopped[0]).name
            print(f"stopped by {name} before the first step, with nothing to save", file=sys.stderr)
            return STOPPED
        if code == BAD_CONFIG:  # it has said why
            return BAD_CONFIG
        print(f"rank {rank} ended with {code}", file=sys.stderr)
        return FAILED
    if end.error is not None:
        print(f"rank {end.rank}: {end.error}", file=sys.stderr)
    return end.exit_code


def _stop(number: int, frame: FrameType | None) -> None:
    """Asked to stop before anything has begun: start it again to go on."""
    print(f"stopped by {signal.Signals(number).name} before the run began", file=sys.stderr)
    raise SystemExit(STOPPED)


def _forward(number: int, frame: FrameType | None) -> None:
    """Pass a request to stop on to the workers, which are this process's only children."""
    _stopped.append(number)
    children = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    if not children:
        _stop(number, frame)
    for pid in children:
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
