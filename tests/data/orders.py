"""The rows of a job in their global order, put together from what the loaders of all ranks give."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.runs import row_hashes
from torchtitan.config import load_config
from torchtitan.data.loader import build_loader
from torchtitan.data.rows.rows import Rows
from torchtitan.feed import blended, data_stages, open_rows
from torchtitan.resolve.job import resolve_job
from torchtitan.state import DataPosition

RANKS, WORKERS = (1, 2, 3, 4), (0, 2)


@dataclass(frozen=True)
class Order:
    """What was found of the order of a job: a hash of its rows by (ranks, workers), and the rows of an epoch."""

    hashes: dict[tuple[int, int], str]
    rows_per_epoch: int
    resumed: bool
    """Whether runs that stopped twice at random steps, to go on on other ranks, went on with the next rows."""

    @property
    def one(self) -> bool:
        return len(set(self.hashes.values())) == 1 and self.resumed


def order_of(
    argv: Sequence[str],
    *,
    steps: int = 12,
    rows_of_a_step: int = 10,
    ranks: Sequence[int] = RANKS,
    resumes: int = 3,
    seed: int = 0,
) -> Order:
    """Compares ``steps`` global batches at all ``ranks`` and WORKERS, and ``resumes`` runs that stopped twice; the last
    batches lie beyond the first epoch if the data is smaller than that."""
    job = resolve_job(load_config(argv), 1)
    sources = open_rows(job)
    position = DataPosition(data_stages(job, sources))
    rows = blended(job, sources, position.place_stages(0, rows_of_a_step))
    hashes = {
        (number, workers): _hash(_steps(rows, number, workers, 0, steps, rows_of_a_step))
        for number in ranks
        for workers in WORKERS
    }
    whole = _steps(rows, 1, 0, 0, steps, rows_of_a_step)
    dice, resumed = random.Random(seed), True
    for _ in range(resumes):
        first, second = sorted(dice.sample(range(1, steps), 2))
        parts = [
            *_steps(rows, 4, 0, 0, first, rows_of_a_step),
            *_steps(rows, 3, 2, first, second - first, rows_of_a_step),
            *_steps(rows, 2, 0, second, steps - second, rows_of_a_step),
        ]
        resumed = resumed and parts == whole
    epoch = min(source.rows_per_epoch for source in sources.values())
    return Order({key: text[:12] for key, text in hashes.items()}, epoch, resumed)


def _steps(rows: Rows, ranks: int, workers: int, step: int, steps: int, rows_of_a_step: int) -> list[list[str]]:
    """Hashes of the rows of each global batch, as ``ranks`` loaders with ``workers`` processes each give them."""
    by_rank = []
    for rank in range(ranks):
        loader = build_loader(
            rows,
            global_batch_size=rows_of_a_step,
            ranks=ranks,
            rank=rank,
            local_batch_size=2,
            first_row=step * rows_of_a_step,
            num_workers=workers,
        )
        batches = iter(loader)
        by_rank.append([[row for batch in next(batches) for row in row_hashes(batch)] for _ in range(steps)])
        loader.close()
    return [[row for own in of_step for row in own] for of_step in zip(*by_rank, strict=True)]


def _hash(steps: Sequence[Sequence[str]]) -> str:
    return hashlib.sha256(repr(steps).encode()).hexdigest()
