"""Rounds of validation by hand: what is averaged, which rows are looked at, and when."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from torchtitan.config.schema import DataLoader
from torchtitan.data.batch import IGNORE_INDEX, Batch
from torchtitan.distributed.topology import Degrees
from torchtitan.evaluate import Evaluator, HeldOut

SEQ_LEN = 9


class Table:
    """Row r has ``valid[r]`` labels, all of them r."""

    seq_len = SEQ_LEN

    def __init__(self, valid: Sequence[int]) -> None:
        self.valid, self.fingerprint = valid, repr(valid)

    def __len__(self) -> int:
        return len(self.valid)

    def first(self, rows: int | None) -> "Table":
        return Table(self.valid[:rows])

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = torch.full((SEQ_LEN,), IGNORE_INDEX)
        labels[: self.valid[row]] = row
        return torch.zeros(SEQ_LEN, dtype=torch.int64), labels, torch.arange(SEQ_LEN)


class Looking:
    """A runner whose loss on row r is ``losses[r]``, and which keeps what it has seen."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses = losses
        self.parts = [nn.Sequential(nn.Linear(2, 2), nn.Dropout())]
        self.batches: list[list[int]] = []
        self.draws = False

    def evaluate(self, batch: Batch, num_valid: float) -> torch.Tensor:
        assert not any(module.training for part in self.parts for module in part.modules())
        if self.draws:
            torch.rand(1)
        rows = [int(labels.max()) for labels in batch.labels if (labels != IGNORE_INDEX).any()]
        self.batches.append(rows)
        return torch.tensor(sum(self.losses[row] for row in rows) / num_valid)


def evaluator(runner: Looking, *tables: Table, names: Sequence[str | None] = (None,), **changes: Any) -> Evaluator:
    """On one rank, in batches of one row, after every third step of 10."""
    values: dict[str, Any] = {
        "topology": SimpleNamespace(degrees=Degrees(shard=1), reader_rank=0),
        "world": SimpleNamespace(sum=list, device=torch.device("cpu")),
        "freq": 3,
        "last_step": 10,
        "rows": None,
        "local_batch_size": 1,
        "multiple_of": 1,
        "workers": DataLoader(),
    }
    sets = [
        HeldOut(name, table.first, "validation.dataset_path", table.fingerprint)
        for name, table in zip(names, tables, strict=True)
    ]
    return Evaluator(sets, runner=cast(Any, runner), **{**values, **changes})


def test_sums_are_divided_once_where_batches_are_unequal() -> None:
    # Means of the batches are 2 and 10; their mean would be 6.
    (found,) = evaluator(Looking([2.0, 90.0]), Table([1, 9])).round(3, cast(Any, False))
    assert (found.step, found.set, found.loss, found.tokens) == (3, None, pytest.approx(9.2, rel=1e-15), 10)


def test_peers_that_hold_a_loss_or_count_labels_together_count_once() -> None:
    degrees = Degrees(shard=1, tensor=2, context=3)
    topology = SimpleNamespace(degrees=degrees, reader_rank=0)
    world = SimpleNamespace(sum=lambda values: [6 * value for value in values], device=torch.device("cpu"))
    # Context peers hold a third of a loss of 90, which each of two tensor peers tells.
    (found,) = evaluator(Looking([30.0]), Table([9]), topology=topology, world=world).round(1, cast(Any, False))
    assert (found.loss, found.tokens) == (10.0, 9)


def test_many_small_losses_are_added_exactly() -> None:
    # A float32 sum of these stays at 2**24.
    count = 64
    table = Table([1] * (count + 1))
    (found,) = evaluator(Looking([2.0**24, *[1.0] * count]), table).round(1, cast(Any, False))
    assert found.loss * (count + 1) == 2.0**24 + count


@pytest.mark.parametrize(
    ("rows", "local_batch_size", "multiple_of", "seen"),
    [
        (None, 3, 1, [[0, 1, 2], [3, 4, 5], [6]]),
        (None, 4, 1, [[0, 1, 2, 3], [4, 5, 6]]),
        (None, 5, 1, [[0, 1, 2, 3], [4, 5, 6]]),  # as equal as they come
        (None, 6, 3, [[0, 1, 2, 3, 4, 5], [6]]),
        (None, 100, 1, [[0, 1, 2, 3, 4, 5, 6]]),
        (4, 3, 1, [[0, 1], [2, 3]]),
        (100, 4, 1, [[0, 1, 2, 3], [4, 5, 6]]),
    ],
)
def test_every_round_looks_at_the_first_rows(
    rows: int | None, local_batch_size: int, multiple_of: int, seen: list[list[int]]
) -> None:
    runner = Looking([1.0] * 7)
    one = evaluator(runner, Table([2] * 7), rows=rows, local_batch_size=local_batch_size, multiple_of=multiple_of)
    for step in (1, 3, 6):
        (found,) = one.round(step, cast(Any, False))
        assert found.loss == 0.5
    assert runner.batches == seen * 3


def test_sets_are_looked_at_one_after_the_other() -> None:
    runner = Looking([8.0, 2.0, 5.0])
    sets = [Table([4, 1, 1]), Table([9])]
    wiki, code = evaluator(runner, *sets, names=["wiki", "code"], local_batch_size=2).round(6, cast(Any, False))
    assert runner.batches == [[0, 1], [2], [0]]
    assert (wiki.set, wiki.loss, wiki.tokens) == ("wiki", 2.5, 6)
    assert (code.set, code.loss, code.tokens) == ("code", pytest.approx(8 / 9), 9)


def test_steps_that_are_due() -> None:
    one = evaluator(Looking([1.0]), Table([1]))
    assert [step for step in range(1, 11) if one.is_due(step)] == [1, 3, 6, 9, 10]


def test_a_round_that_is_to_stop_ends_with_its_batch_and_tells_nothing() -> None:
    runner = Looking([1.0] * 5)

    class AfterTwo:
        def __bool__(self) -> bool:
            return len(runner.batches) >= 2

    assert evaluator(runner, Table([1] * 5)).round(3, cast(Any, AfterTwo())) == []
    assert runner.batches == [[0], [1]]


def test_modes_and_generators_are_as_they_were() -> None:
    runner = Looking([1.0])
    runner.draws = True
    runner.parts[0][0].eval()
    modes = [module.training for module in runner.parts[0].modules()]
    drawn = torch.get_rng_state()
    evaluator(runner, Table([1])).round(1, cast(Any, False))
    assert [module.training for module in runner.parts[0].modules()] == modes == [True, False, True]
    assert torch.equal(torch.get_rng_state(), drawn)
