"""Tables of a foreign order: made once into the cache folder by whichever process comes first, and mapped by all.

What stands in them is in the module of each order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.sharing import make_together
from torchtitan.data.tokens.cache import cache_path
from torchtitan.errors import ConfigError
from torchtitan.log import logger

Tables = Mapping[str, npt.NDArray[Any]]


def open_tables(kind: str, facts: tuple[Any, ...], make: Callable[[], Tables], *, cache_folder: str) -> Tables:
    """The arrays that ``make`` gives, from ``cache_folder`` (empty: the user's) where they were made for the same
    ``facts``. ConfigError where that folder cannot be used."""
    digest = hashlib.sha256(repr((kind, facts)).encode()).hexdigest()[:20]
    root = cache_path(cache_folder)
    folder = root / f"order-{kind}-{digest}"

    def assemble(_: list[Path]) -> None:
        logger.info(f"working out the order of {kind}, once, into {folder}")
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(exist_ok=True)
        for name, table in make().items():
            np.save(unfinished / f"{name}.npy", table)
        unfinished.rename(folder)

    try:
        make_together(
            folder.with_suffix(".work"),
            0,
            make=lambda k, path: None,
            assemble=assemble,
            finished=folder.exists,
        )
        # Plain arrays, for np.memmap costs several times as much to index.
        return {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in sorted(folder.glob("*.npy"))}
    except (OSError, ValueError) as error:
        raise ConfigError(
            "data.cache_folder", f"cannot keep the order of the data in {folder} ({error}); name another folder"
        ) from error
