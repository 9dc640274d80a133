"""build_loader(): which rows a rank takes at each step, as micro-batches, drawn by any number of workers.

What is in a row does not belong here (rows/).
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.data.rows.rows import Rows
from torchtitan.errors import ConfigError, LostProcessError
from torchtitan.platforms import SIGNALS

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """What one of ``ranks`` data-parallel ranks takes of a step's global batch.

    All ranks take equally many rows, in equally large micro-batches of a multiple of ``multiple_of`` rows that are no
    larger than ``local_batch_size``, itself such a multiple: what is missing to that is filled up with rows that count
    in no loss.
    """

    global_batch_size: int
    ranks: int
    rank: int
    local_batch_size: int
    multiple_of: int = 1

    @property
    def _rows_per_rank(self) -> int:
        return math.ceil(self.global_batch_size / self.ranks)

    @property
    def micro_batches(self) -> int:
        return math.ceil(self._rows_per_rank / self.local_batch_size)

    @property
    def micro_batch_size(self) -> int:
        rows = math.ceil(self._rows_per_rank / self.micro_batches)
        return math.ceil(rows / self.multiple_of) * self.multiple_of

    def rows(self, first_row: int, step: int) -> range:
        """Global indices of this rank's rows, ``step`` steps after the one that began with ``first_row``."""
        begin, end = (min(r * self._rows_per_rank, self.global_batch_size) for r in (self.rank, self.rank + 1))
        offset = first_row + step * self.global_batch_size
        return range(offset + begin, offset + end)


class Loader:
    """Endless iterable of steps; each is a list of ``micro_batches`` batches of one shape.

    Its position is one number that the trainer keeps, the next step's first row, so a run may stop and go
    on with another number of ranks or workers. It is to be closed when no more steps are wanted.
    """

    def __init__(self, steps: StatefulDataLoader[Any], micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._steps = steps
        self._running: Any = None

    def __iter__(self) -> Iterator[list[Batch]]:
        # Born deaf to them: a signal that came before _outlive_signals would end a worker.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with _death_is_told_here():
            try:
                self._running = iter(self._steps)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while True:
            try:
                tensors = next(self._running)
            except (RuntimeError, OSError, EOFError):
                self._tell_of_the_dead()
                raise
            if isinstance(tensors, ConfigError):
                raise ConfigError(tensors.key, tensors.problem)
            yield [Batch(*micro_batch) for micro_batch in zip(*tensors, strict=True)]

    def _tell_of_the_dead(self) -> None:
        """LostProcessError where a worker ended, as one does that the system kills.

        It is waited for a little: what it was about to send breaks off first.
        """
        workers = getattr(self._running, "_workers", [])
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=bool(workers))
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(5)
            if worker.exitcode:
                raise LostProcessError(_how_it_ended(worker.pid, worker.exitcode)) from None

    def close(self) -> None:
        """End the workers. The loader gives nothing more after it."""
        if self._running is not None and self._steps.num_workers > 0:
            # Private, but dropping the iterator would not do: a traceback may still hold it.
            self._running._shutdown_workers()
        self._running = None


@contextmanager
def _death_is_told_here() -> Iterator[None]:
    """Within, workers are started. torch would have their death raise an error wherever the trainer is just then;
    whoever waits for their next step learns of it as well."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)


def _how_it_ended(pid: int, code: int) -> str:
    who = f"a worker of the data loader (process {pid})"
    if code > 0:
        return f"{who} ended with exit code {code}; what it said is above"
    hint = (
        "; the system does so where memory is short: lower training.dataloader.num_workers or prefetch_factor"
        if code == -signal.SIGKILL
        else ""
    )
    return f"{who} was killed by {signal.Signals(-code).name}{hint}"


def build_loader(
    rows: Rows,
    *,
    global_batch_size: int,
    ranks: int,
    rank: int,
    local_batch_size: int,
    multiple_of: int = 1,
    first_row: int = 0,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    pin_memory: bool = False,
) -> Loader:
    """A loader of this rank's share of each global batch, from row ``first_row`` on.

    ``rank`` and ``ranks`` are data-parallel. The global batches are the same for any number of ranks and workers
    and any ``local_batch_size``. A micro-batch has a multiple of ``multiple_of`` rows. ``prefetch_factor`` is the
    number of steps each worker prepares ahead (None: 2).
    """
    if prefetch_factor is not None and num_workers == 0:
        raise ConfigError(
            "training.dataloader.prefetch_factor",
            "nothing is prefetched without workers; set training.dataloader.num_workers, or leave this out",
        )
    share = Share(global_batch_size, ranks, rank, local_batch_size, multiple_of)
    with warnings.catch_warnings():
        # torchdata 0.11 calls something that torch 2.13 deprecates; nobody here can mend it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        steps: StatefulDataLoader[Any] = StatefulDataLoader(
            _Steps(rows, share, first_row),
            batch_size=None,
            sampler=_Forever(),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            worker_init_fn=_outlive_signals,
            # Its own, or starting it would draw from the generator of the whole process.
            generator=torch.Generator(),
            # Its state is tied to the number of workers; ours is the row.
            snapshot_every_n_steps=None,
        )
    return Loader(steps, share.micro_batches)


class _Steps(Dataset[Tensors | ConfigError]):
    """Step number to tokens, labels and positions, each ``[micro_batches, micro_batch_size, seq]``.

    Or to what a person can mend, as a value: raised in a worker, torch would make a page of it.
    """

    def __init__(self, rows: Rows, share: Share, first_row: int) -> None:
        self._rows, self._share, self._first_row = rows, share, first_row

    def __getitem__(self, step: int) -> Tensors | ConfigError:
        try:
            return self._fill(step)
        except ConfigError as error:
            return error

    def _fill(self, step: int) -> Tensors:
        share, seq_len = self._share, self._rows.seq_len
        shape = (share.micro_batches, share.micro_batch_size, seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORE_INDEX)
        positions = torch.arange(seq_len).expand(shape).contiguous()
        filled = tokens.view(-1, seq_len), labels.view(-1, seq_len), positions.view(-1, seq_len)
        for slot, row in enumerate(share.rows(self._first_row, step)):
            for whole, part in zip(filled, self._rows[row], strict=True):
                whole[slot] = part
        return tokens, labels, positions


class _Forever(Sampler[int]):
    """The steps 0, 1, 2, ..."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def _as_it_is(step: Tensors | ConfigError) -> Tensors | ConfigError:
    return step


def _outlive_signals(worker: int) -> None:
    """A signal to the whole job is the trainer's to answer, with a save; until then it needs its workers.

    They obey the trainer alone, which ends them when it closes or exits; and when it is killed, torch's worker
    loop, which looks for its parent every few seconds, ends by itself.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_when_the_trainer_says, daemon=True).start()


def _end_when_the_trainer_says() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer.pid:
        pass
    os._exit(0)
