import contextlib
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data._utils import signal_handling

from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.data.loader import Loader, Share, build_loader
from torchtitan.errors import ConfigError, LostProcessError

SEQ_LEN = 4


class Counted:
    """Row i holds the number i, so that it is seen which rows came, in which order."""

    seq_len = SEQ_LEN
    fingerprint = "counted"

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        full = torch.full((SEQ_LEN,), row)
        return full, full + 1, torch.arange(SEQ_LEN)


@contextlib.contextmanager
def loading(**options: Any) -> Iterator[Loader]:
    arguments = {"global_batch_size": 8, "ranks": 1, "rank": 0, "local_batch_size": 8, **options}
    loader = build_loader(Counted(), **arguments)
    try:
        yield loader
    finally:
        loader.close()


def steps(count: int, **options: Any) -> list[list[Batch]]:
    with loading(**options) as loader:
        return list(itertools.islice(loader, count))


def rows_in(step: list[Batch]) -> list[int]:
    """Global rows of one rank's step, in order, without padding."""
    return [
        int(tokens[0])
        for batch in step
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
        if (labels != IGNORE_INDEX).any()
    ]


def global_steps(count: int, *, ranks: int, **options: Any) -> list[list[int]]:
    by_rank = [steps(count, ranks=ranks, rank=rank, **options) for rank in range(ranks)]
    return [[row for rank in range(ranks) for row in rows_in(by_rank[rank][step])] for step in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_global_batches_depend_on_nothing_but_their_size(ranks: int, workers: int) -> None:
    expected = [list(range(21 + 7 * t, 28 + 7 * t)) for t in range(3)]
    for local in (1, 3, 8) if workers == 0 else (2,):
        found = global_steps(
            3, ranks=ranks, num_workers=workers, local_batch_size=local, global_batch_size=7, first_row=21
        )
        assert found == expected


def test_content_is_hashed_equal_for_any_workers() -> None:
    def digest(workers: int, prefetch: int | None) -> str:
        batches = [
            b for step in steps(6, num_workers=workers, prefetch_factor=prefetch, local_batch_size=3) for b in step
        ]
        content = [t.numpy().tobytes() for b in batches for t in (b.tokens, b.labels, b.positions)]
        return hashlib.sha256(b"".join(content)).hexdigest()

    assert len({digest(0, None), digest(1, None), digest(2, 1), digest(2, 4)}) == 1


def test_resumes_anywhere_on_another_number_of_ranks() -> None:
    """4 ranks for 5 steps, then 3 for 4, then 1: no row lost, none twice."""
    seen: list[list[int]] = []
    for count, ranks in ((5, 4), (4, 3), (3, 1)):
        seen += global_steps(count, ranks=ranks, first_row=8 * len(seen))
    assert [row for step in seen for row in step] == list(range(8 * 12))


class TestShare:
    @pytest.mark.parametrize("size", [1, 2, 5, 7, 8, 13])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
    @pytest.mark.parametrize("local", [1, 2, 3, 8])
    def test_covers_each_row_once_in_equal_shapes(self, size: int, ranks: int, local: int) -> None:
        shares = [Share(size, ranks, rank, local) for rank in range(ranks)]
        assert [row for share in shares for row in share.rows(100, 2)] == list(range(100 + 2 * size, 100 + 3 * size))
        assert len({(s.micro_batches, s.micro_batch_size) for s in shares}) == 1
        slots = shares[0].micro_batches * shares[0].micro_batch_size
        assert shares[0].micro_batch_size <= local
        assert max(len(share.rows(0, 0)) for share in shares) <= slots < size / ranks + 1 + shares[0].micro_batches

    def test_divisible_sizes_are_not_padded(self) -> None:
        share = Share(16, 2, 1, 4)
        assert (share.micro_batches, share.micro_batch_size, share.rows(0, 1)) == (2, 4, range(24, 32))


def test_padding_counts_in_no_loss() -> None:
    """5 rows on 2 ranks: 3 and 2, in micro-batches of 2 and 2."""
    by_rank = [steps(1, global_batch_size=5, ranks=2, rank=rank, local_batch_size=2)[0] for rank in range(2)]
    assert [[b.tokens.shape for b in step] for step in by_rank] == [[(2, SEQ_LEN)] * 2] * 2
    assert [[b.num_valid() for b in step] for step in by_rank] == [[8, 4], [8, 0]]
    padding = by_rank[1][1]
    assert padding.tokens.eq(0).all() and padding.labels.eq(IGNORE_INDEX).all()
    assert padding.positions.tolist() == [list(range(SEQ_LEN))] * 2


def test_says_how_many_micro_batches_a_step_has() -> None:
    with loading(local_batch_size=3) as loader:
        assert loader.micro_batches == 3
        assert {len(step) for step in itertools.islice(loader, 2)} == {3}


def test_prefetching_needs_workers() -> None:
    with pytest.raises(ConfigError, match="without workers") as error, loading(prefetch_factor=2):
        pass
    assert error.value.key == "training.dataloader.prefetch_factor"


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_the_random_numbers_of_the_run_alone(workers: int) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    steps(2, num_workers=workers)
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_person_can_mend_is_told_as_it_is(workers: int) -> None:
    """From a worker too, when its step comes and not before."""

    class Bad(Counted):
        def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            if row == 9:
                raise ConfigError("training.dataset_path", f"row {row} is bad")
            return super().__getitem__(row)

    loader = build_loader(Bad(), global_batch_size=4, ranks=1, rank=0, local_batch_size=4, num_workers=workers)
    try:
        loading = iter(loader)
        assert [rows_in(next(loading)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ConfigError, match="row 9 is bad") as error:
            next(loading)
        assert error.value.key == "training.dataset_path"
    finally:
        loader.close()


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_end(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.02)
    return False


class TestWorkers:
    def test_end_when_closed(self) -> None:
        before = set(children(os.getpid()))
        with loading(num_workers=2) as loader:
            next(iter(loader))
            started = set(children(os.getpid())) - before
            assert len(started) == 2
        assert await_end(list(started), 3)
        assert not started & set(children(os.getpid())), "nobody waited for a worker"

    def test_end_when_closed_in_the_midst_of_an_error(self) -> None:
        """A traceback holds the iterator: dropping it would not end them."""

        class Broken(Counted):
            def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                raise ArithmeticError(f"row {row}")

        loader = build_loader(Broken(), global_batch_size=2, ranks=1, rank=0, local_batch_size=2, num_workers=2)
        before = set(children(os.getpid()))
        with pytest.raises(ArithmeticError, match="row 0"):
            next(iter(loader))
        loader.close()
        assert not set(children(os.getpid())) - before

    def test_survive_signals_to_the_whole_job(self) -> None:
        before = set(children(os.getpid()))
        with loading(num_workers=2) as loader:
            running = iter(loader)
            seen = [rows_in(next(running))]
            started = set(children(os.getpid())) - before
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                for pid in started:
                    # From another process, as from torchrun, a batch system or a terminal.
                    subprocess.run(["kill", f"-{number}", str(pid)], check=True)
            time.sleep(0.3)
            seen += [rows_in(next(running)) for _ in range(10)]
        assert [row for step in seen for row in step] == list(range(88))

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_one_that_is_killed_is_told(self, number: signal.Signals) -> None:
        """In a line, when its next step is asked for and not before."""
        before = set(children(os.getpid()))
        with loading(num_workers=2) as loader:
            running = iter(loader)
            next(running)
            pid = min(set(children(os.getpid())) - before)
            os.kill(pid, number)
            assert await_end([pid], 3)
            sum(range(10**5))  # where torch's handler would raise
            with pytest.raises(LostProcessError, match=rf"process {pid}\) was killed by {number.name}") as error:
                for _ in range(20):
                    next(running)
            assert ("memory is short" in str(error.value)) == (number == signal.SIGKILL)

    def test_survive_one_that_comes_while_they_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handlers = signal_handling._set_worker_signal_handlers

        def signalled() -> None:
            handlers()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                os.kill(os.getpid(), number)

        monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", signalled)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with loading(num_workers=2) as loader:
            assert rows_in(next(iter(loader))) == list(range(8))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


SCRIPT = """
import os, sys, tempfile, time
import torch, torch.distributed as dist
sys.path.insert(0, {checkout!r})
from tests.data.test_loader import Counted, children, rows_in
from torchtitan.data.loader import build_loader

def main(end, workers):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1000))
    torch.rand(500, 500) @ torch.rand(500, 500)
    loader = build_loader(
        Counted(), global_batch_size=4, ranks=1, rank=0, local_batch_size=2, num_workers=workers, prefetch_factor=4
    )
    running = iter(loader)
    for step in range(50):
        assert rows_in(next(running)) == list(range(4 * step, 4 * step + 4))
        dist.all_reduce(torch.ones(1000))
    print(*children(os.getpid()), flush=True)
    if end == "close":
        loader.close()
    if end == "wait":
        time.sleep(60)
    dist.destroy_process_group()

if __name__ == "__main__":
    spawn = sys.argv[2] == "spawn"
    if spawn:
        import multiprocessing
        multiprocessing.set_start_method("spawn")
    main(sys.argv[1], workers=1 if spawn else 2)
"""


def run_script(folder: Path, end: str, method: str = "default") -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(checkout=str(Path(__file__).resolve().parents[2]))))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-W", "error", str(path), end, method], text=True, **pipes)


class TestAsAProgram:
    """With gloo's threads running, as in training, and warnings as errors."""

    @pytest.mark.parametrize(("end", "method"), [("close", "spawn"), ("forget", "default")])
    def test_ends_by_itself_and_leaves_nothing(self, tmp_path: Path, end: str, method: str) -> None:
        process = run_script(tmp_path, end, method)
        output, errors = process.communicate(timeout=90)
        assert (process.returncode, errors) == (0, "")
        workers = [int(pid) for pid in output.split()]
        assert len(workers) == 2, "two workers, or one and the tracker of what spawn leaves behind"
        assert await_end(workers, 5)

    def test_killed_it_takes_its_workers_along(self, tmp_path: Path) -> None:
        process = run_script(tmp_path, "wait")
        assert process.stdout is not None and process.stderr is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
        process.wait()
        assert len(workers) == 2 and await_end(workers, 12)
        process.stdout.close()
        process.stderr.close()
