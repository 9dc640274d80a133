"""Validation: the loss on rows that are not trained on, by the runner that trains, without a trace in the run.

What the rows of a set are is in ``data/rows/validation.py``; what becomes of the numbers, in ``observe/``.
"""

import functools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchtitan.config.schema import DataLoader
from torchtitan.data.blend import Source
from torchtitan.data.files import KEY
from torchtitan.data.loader import Share, build_loader
from torchtitan.data.rows.build import build_rows_once
from torchtitan.data.rows.validation import Rounds, RowsOnce, ToldTable
from torchtitan.distributed.runner import Runner
from torchtitan.distributed.topology import Topology
from torchtitan.distributed.world import World
from torchtitan.feed import open_source
from torchtitan.log import logger
from torchtitan.observe.metrics import ValidationStats
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import Job


@dataclass(frozen=True)
class HeldOut:
    """A set of rows; ``name`` is None where the run has one set and its configuration no name for it.

    ``fingerprint`` is equal only where the data are, which lie where ``key`` says.
    """

    name: str | None
    rows: RowsOnce
    key: str
    fingerprint: str

    def __str__(self) -> str:
        return "validation" if self.name is None else f"validation set {self.name}"


class Evaluator:
    """Takes the loss on the same rows of ``sets`` in every round; built and called by all ranks together.

    There is a round after step 1, every ``freq`` steps and after ``last_step``. It looks at the first ``rows`` of each
    set (None: at all of it), whatever the number of ranks, in batches of at most ``local_batch_size`` rows a rank that
    are as equal as they come; ``multiple_of`` is what their rows are a multiple of. What the ranks do not divide is
    filled up with rows that count in no loss, so all ranks take part in equally many batches. The workers live as long
    as the run, with ``workers.prefetch_factor`` batches each (None: 2).
    """

    def __init__(
        self,
        sets: Sequence[HeldOut],
        *,
        runner: Runner,
        topology: Topology,
        world: World,
        freq: int,
        last_step: int,
        rows: int | None,
        local_batch_size: int,
        multiple_of: int,
        workers: DataLoader,
    ) -> None:
        self._sets, self._runner, self._topology, self._world = list(sets), runner, topology, world
        self._freq, self._last_step = freq, last_step
        tables = [each.rows(rows) for each in sets]
        readers = topology.degrees.readers
        share = Share(max(map(len, tables)), readers, topology.reader_rank, local_batch_size, multiple_of)
        batch_size = share.micro_batch_size * readers
        rounds = Rounds(tables, batch_size=batch_size)
        self._num_batches = rounds.batches
        for each, table in zip(sets, tables, strict=True):
            which = "first" if len(table) == rows else "all"
            logger.info(
                f"{each}: {which} {len(table):,} rows of {rounds.seq_len} tokens a round, "
                f"{share.micro_batch_size} a rank at once"
            )
        self._loader = build_loader(
            rounds,
            global_batch_size=batch_size,
            ranks=readers,
            rank=topology.reader_rank,
            local_batch_size=share.micro_batch_size,
            multiple_of=multiple_of,
            num_workers=workers.num_workers,
            prefetch_factor=workers.prefetch_factor,
            pin_memory=workers.pin_memory,
        )
        # One round follows the other in it, so what is taken must be whole rounds.
        self._batches = iter(self._loader)

    def is_due(self, step: int) -> bool:
        """Whether a round follows ``step``."""
        return step in (1, self._last_step) or step % self._freq == 0

    def round(self, step: int, stop: StopRequest) -> list[ValidationStats]:
        """The loss on each set after ``step``. None of them, and no round after it, if any rank is asked to stop
        meanwhile: the batch in progress is the last one."""
        found = []
        with self._without_trace():
            for each, batches in zip(self._sets, self._num_batches, strict=True):
                start = time.perf_counter()
                mean = self._mean_loss(batches, stop)
                if mean is None:
                    logger.warning(f"validation after step {step} is cut short, and tells nothing: asked to stop")
                    return []
                found.append(ValidationStats(step, each.name, *mean, time.perf_counter() - start))
        return found

    def _mean_loss(self, batches: int, stop: StopRequest) -> tuple[float, int] | None:
        """Of the next ``batches``, and the number of labels that it is the mean of; None if asked to stop."""
        degrees, device = self._topology.degrees, self._world.device
        total, own_valid = torch.zeros((), dtype=torch.float64, device=device), 0
        for _ in range(batches):
            (batch,) = next(self._batches)
            own_valid += batch.num_valid()
            # Sums are added up, and divided once: a mean of means would weigh a short last batch like a full one.
            total += self._runner.evaluate(batch.to(device), 1.0)
            if any(self._world.sum([float(bool(stop))])):
                return None
        # Tensor peers hold the same loss, other peers parts of it; all peers counted the same labels.
        loss, valid = self._world.sum([float(total) / degrees.tensor, own_valid])
        tokens = round(valid) // degrees.copies
        return loss / tokens if tokens else math.nan, tokens

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Modules in their mode of evaluation, and what they draw put back, until the end."""
        device = self._world.device
        modes = [(module, module.training) for part in self._runner.parts for module in part.modules()]
        for part in self._runner.parts:
            part.eval()
        try:
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                yield
        finally:
            for module, training in modes:
                module.training = training

    def close(self) -> None:
        """Release loader workers."""
        self._loader.close()


def open_held_out(job: Job, *, rank: int, ranks: int) -> list[HeldOut]:
    """The sets that ``job`` validates on, packed as what it trains on; all ``ranks`` share the work where text is to be
    tokenised first."""
    held_out, data = [], job.config.data
    if job.validation is not None:
        for name, source in job.validation.sets.items():
            tokens = open_source(job, source, rank=rank, ranks=ranks)
            with source.told():
                rows = build_rows_once(
                    tokens, packing=data.packing, seq_len=job.validation.seq_len, cache_folder=data.cache_folder
                )
            rows = functools.partial(_told, rows, source)
            held_out.append(HeldOut(name, rows, source.told_as[KEY], tokens.fingerprint))
    return held_out


def _told(rows: RowsOnce, source: Source, most: int | None) -> ToldTable:
    with source.told():
        return ToldTable(rows(most), source.told_as, source.name)


def build_evaluator(
    job: Job, held_out: Sequence[HeldOut], *, runner: Runner, topology: Topology, world: World, global_batch_size: int
) -> Evaluator | None:
    """What validates in ``job``, whose training steps have ``global_batch_size`` rows; None if nothing does."""
    plan, keys = job.validation, job.config.validation
    if plan is None:
        return None
    return Evaluator(
        held_out,
        runner=runner,
        topology=topology,
        world=world,
        freq=keys.freq,
        last_step=job.config.training.steps,
        rows=None if keys.steps == -1 else keys.steps * (keys.global_batch_size or global_batch_size),
        local_batch_size=plan.local_batch_size,
        multiple_of=job.spread.rows_multiple,
        workers=keys.dataloader,
    )
