"""Orders that stand in tables: made once into the cache folder by whichever process comes first, and mapped by all.

What stands in them is in the module of each order.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.contents import content_hash
from torchtitan.data.rows.rows import Rows, fingerprint_of
from torchtitan.data.sharing import make_together
from torchtitan.data.tokens.cache import cache_path, kept_in
from torchtitan.log import logger

Tables = Mapping[str, npt.NDArray[Any]]
_HASHES = "hashes.json"


def open_tables(kind: str, facts: tuple[Any, ...], make: Callable[[], Tables], *, cache_folder: str) -> Tables:
    """The arrays that ``make`` gives, from ``cache_folder`` (empty: the user's) where they were made for the same
    ``facts`` and are what was written then. ConfigError where that folder cannot be used."""
    digest = fingerprint_of(kind, facts)[:20]
    root = cache_path(cache_folder)
    folder = root / f"order-{kind}-{digest}"

    def assemble(_: list[Path]) -> None:
        logger.info(f"working out the order of {kind}, once, into {folder}")
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(exist_ok=True)
        hashes = {}
        for name, table in make().items():
            path = unfinished / f"{name}.npy"
            with open(path, "wb") as file:
                np.save(file, table)
                file.flush()
                os.fsync(file.fileno())
            hashes[path.name] = content_hash(path)
        (unfinished / _HASHES).write_text(json.dumps(hashes))
        if folder.exists():  # and is not what was written
            shutil.rmtree(folder)
        unfinished.rename(folder)

    with kept_in(folder, "the order of the data", ValueError):
        if (folder / _HASHES).exists() and not _is_whole(folder):
            logger.warning(f"{folder} was changed after it was written: making it again")
        make_together(
            folder.with_suffix(".work"),
            0,
            make=lambda k, path: None,
            assemble=assemble,
            finished=lambda: _is_whole(folder),
        )
        # Plain arrays, for np.memmap costs several times as much to index.
        return {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in sorted(folder.glob("*.npy"))}


def _is_whole(folder: Path) -> bool:
    """Whether the tables in ``folder`` are those that were written there; of the largest, a sample of them."""
    try:
        hashes = json.loads((folder / _HASHES).read_bytes())
        return all(content_hash(folder / name) == known for name, known in hashes.items())
    except (FileNotFoundError, ValueError, AttributeError):
        return False


def beyond(row: int, rows: int) -> IndexError:
    return IndexError(f"row {row:,} is beyond the {rows:,} that this order was worked out for")


class TabledRows:
    """Rows of several sources in the order of two tables: ``chosen`` says which source gives a row, ``own`` which of
    its rows that is. After the last one they begin anew, or, not ``repeated``, there is none."""

    def __init__(
        self,
        rows: Mapping[str, Rows],
        kind: str,
        make: functools.partial[dict[str, npt.NDArray[Any]]],
        *,
        repeated: bool,
        cache_folder: str,
    ) -> None:
        self._made_of = functools.partial(TabledRows, rows, kind, make, repeated=repeated, cache_folder=cache_folder)
        facts = (make.args, sorted(make.keywords.items()))
        self.tables = open_tables(kind, facts, make, cache_folder=cache_folder)
        self._chosen, self._own = self.tables["chosen"], self.tables["own"]
        self._names, self._rows, self._repeated = list(rows), list(rows.values()), repeated
        self._counted = 0, np.zeros(len(self._names), np.int64)
        self.seq_len = self._rows[0].seq_len
        self.fingerprint = fingerprint_of(kind, facts, [part.fingerprint for part in self._rows])

    def __reduce__(self) -> Any:
        return self._made_of, ()

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, own = self._place(row)
        return self._rows[chosen][own]

    def place(self, row: int) -> tuple[str, int]:
        chosen, own = self._place(row)
        return self._names[chosen], own

    def _place(self, row: int) -> tuple[int, int]:
        if row < 0 or (not self._repeated and row >= len(self._chosen)):
            raise beyond(row, len(self._chosen))
        place = row % len(self._chosen)
        return int(self._chosen[place]), int(self._own[place])

    def counts(self, rows: int) -> dict[str, int]:
        epochs, rest = divmod(rows, len(self._chosen))
        # From where it was asked last, for a run asks at every step that it logs.
        before, counts = self._counted if self._counted[0] <= rest else (0, 0 * self._counted[1])
        counts = counts + self._bincount(before, rest)
        self._counted = rest, counts
        if epochs:
            counts = counts + epochs * self._of_an_epoch
        return dict(zip(self._names, counts.tolist(), strict=True))

    @functools.cached_property
    def _of_an_epoch(self) -> npt.NDArray[np.int64]:
        return self._bincount(0, len(self._chosen))

    def _bincount(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """How many of the rows ``begin`` to ``end`` of an epoch each source gives."""
        return np.bincount(self._chosen[begin:end], minlength=len(self._names))
