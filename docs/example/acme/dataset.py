"""Sums in words of digits: text that is made, not read."""

import random
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from torchtitan.data.datasets import DATASETS, OnBadRecord, TextSource
from torchtitan.errors import ConfigError


class Sums:
    name = "sums"
    num_pieces = 4

    def __init__(self, largest: int, documents: int) -> None:
        self.largest, self.documents = largest, documents
        self.description = f"{documents} sums of numbers up to {largest}"
        self.fingerprint = f"sums {largest} {documents}"

    def read(self, piece: int) -> Iterator[str]:
        dice = random.Random(piece)
        for _ in range(piece, self.documents, self.num_pieces):
            a, b = dice.randint(0, self.largest), dice.randint(0, self.largest)
            yield f"{a} + {b} = {a + b}"


@DATASETS.register("sums")
def sums(
    path: str | None,
    on_bad_record: OnBadRecord,
    *,
    largest: Annotated[int, Field(ge=1, description="largest number that is added")] = 999,
    documents: Annotated[int, Field(ge=4, description="how many sums there are")] = 4000,
) -> TextSource:
    """Sums of two numbers, with their results."""
    if path is not None:
        raise ConfigError("training.dataset_path", "sums are made, not read; leave it out")
    return Sums(largest, documents)
