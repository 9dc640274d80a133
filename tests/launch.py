"""Runs a function on several gloo ranks, or a command, with a hard time limit, after which nothing of it is left.

The ranks are forked from a server process that has torch imported, so that a launch costs a fraction of a second.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


Main = Callable[[list[str]], int]
"""What a command is: of its words the exit code."""


class RanksFailed(AssertionError):
    """A rank raised, died or ran out of time; the message is the first failing rank's error."""


def run_ranks(target: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``target(world, *args)`` on ``ranks`` processes; the results in the order of ranks."""
    with _started_ranks(target, ranks, args) as (processes, folder):
        _await(processes, folder, time.monotonic() + timeout)
        return [pickle.loads((folder / f"result-{r}").read_bytes()) for r in range(ranks)]


def kill_ranks(
    target: Callable[..., Any], ranks: int, *args: Any, when: Callable[[], bool], timeout: float = 120.0
) -> bool:
    """As ``run_ranks``, but SIGKILL to all ranks once ``when``, which is asked a thousand times a second; False if they
    ended before. Whatever a rank has started must end with it: it is not killed, and awaited."""
    deadline = time.monotonic() + timeout
    with _started_ranks(target, ranks, args) as (processes, folder):
        while not when():
            if not wait([p.sentinel for p in processes], timeout=0.001):
                assert time.monotonic() < deadline, "nothing came up to kill the ranks at"
                continue
            _await(processes, folder, deadline)
            return False
        started = {child for process in processes for child in with_descendants(process.pid)[1:]}
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        await_end(started, deadline)
        return True


@contextlib.contextmanager
def _started_ranks(target: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> Iterator[tuple[list[Any], Path]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_context.Process(target=_rank, args=(target, r, ranks, folder, args)) for r in range(ranks)]
        for process in processes:
            process.start()
        try:
            yield processes, folder
        finally:
            for process in processes:
                if process.is_alive() and process.pid:
                    _kill_session(process.pid)
                process.join()


def _await(processes: list[Any], folder: Path, deadline: float) -> None:
    running = dict(enumerate(processes))
    while running:
        wait([p.sentinel for p in running.values()], timeout=max(0.0, deadline - time.monotonic()))
        failed = [r for r, p in running.items() if p.exitcode not in (None, 0)]
        if failed:
            errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            text = errors[0].read_text() if errors else f"rank {failed[0]} ended with {running[failed[0]].exitcode}"
            raise RanksFailed(text)
        running = {r: p for r, p in running.items() if p.exitcode is None}
        if running and time.monotonic() >= deadline:
            raise RanksFailed(f"ranks {sorted(running)} were still running at the time limit")


def _kill_session(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # with its loader workers; itself, if it had no time to start a session
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _rank(target: Callable[..., Any], rank: int, ranks: int, folder: Path, args: tuple[Any, ...]) -> None:
    os.setsid()
    import torch
    import torch.distributed as dist

    from torchtitan.distributed.world import World

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
        world = World(rank, rank, ranks, ranks, torch.device("cpu"))
        result = target(world, *args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        world.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank} failed:\n{traceback.format_exc()}")
        os._exit(1)


@contextlib.contextmanager
def started_main(
    main: Main, argv: Sequence[str], *, folder: Path, path: Path | None = None, **environment: str
) -> Iterator[Any]:
    """A process of ``main(argv)`` in ``folder``, with packages of ``path`` too, as ``python -m`` would start it but for
    the seconds that imports take. What it prints goes into the file ``printed`` there; it is killed at the end."""
    arguments = (main, list(argv), folder, path or folder, {**os.environ, **environment})
    process = _context.Process(target=_main, args=arguments)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive() and process.pid:
            _kill_session(process.pid)
        process.join()


def run_main(
    main: Main, argv: Sequence[str], *, folder: Path, path: Path | None = None, timeout: float = 120.0
) -> tuple[int | None, str]:
    """How it ended, None if it did not in time, and what it printed."""
    with started_main(main, argv, folder=folder, path=path) as process:
        process.join(timeout)
        code = process.exitcode
    return code, (folder / "printed").read_text()


def _main(main: Main, argv: list[str], folder: Path, path: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(path))
    printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.exit(main(argv))


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running command, with the options of Popen; whatever of it runs at the end is killed with all it started."""
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        for pid in with_descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def run_command(command: Sequence[str], *, timeout: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """The ended command, with what it printed."""
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        output, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def await_end(pids: Iterable[int], deadline: float) -> None:
    """Return once none of the processes runs, which must be before ``deadline`` (``time.monotonic()``)."""
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.001)


def children_of(pid: int) -> list[int]:
    """Process ids of what ``pid`` has started and still runs."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(child) for child in path.read_text().split()]
    return sorted(children)


def with_descendants(pid: int) -> list[int]:
    """``pid`` and the process ids of all that it and its children have started and still run."""
    return [pid, *(inner for child in children_of(pid) for inner in with_descendants(child))]
