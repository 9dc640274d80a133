"""Whole documents put together into rows: those of ``data.packing = "best_fit"``, and the plan of them on disk.

Which piece goes where is worked out in bins.py.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.contents import WHOLE_BYTES
from torchtitan.data.files import KEY
from torchtitan.data.rows.bins import best_fit, by_rows, cut_documents
from torchtitan.data.rows.rows import fingerprint_of, place_of, restart_at
from torchtitan.data.sharing import make_together
from torchtitan.data.tokens.cache import cache_path, kept_in
from torchtitan.data.tokens.store import Documents, Tokens, map_array
from torchtitan.errors import ConfigError
from torchtitan.log import logger

# Raised by who changes what the plan of given documents is. How it is written its size and its hash tell.
_FORMAT = 1
_HASH_BYTES = 16


class Plan:
    """Which pieces of documents stand in which row, mapped from a file: int64, then int32, and a hash of all of it.

    ``format, rows, pieces, documents``, of each row its first piece (``[rows + 1]``), of each piece the token that it
    begins at and the number of its labels (``[pieces]`` each).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        version, self.rows, self.pieces, self.documents = map_array(path, "<i8", count=4).tolist()
        size = 8 * (4 + self.rows + 1 + self.pieces) + 4 * self.pieces + _HASH_BYTES
        if version != _FORMAT or path.stat().st_size != size:
            raise ValueError(f"{path} is not a plan of {self.rows} rows")
        edges = 8 * 4
        begins = edges + 8 * (self.rows + 1)
        lengths = begins + 8 * self.pieces
        self.edges: npt.NDArray[np.int64] = map_array(path, "<i8", offset=edges, count=self.rows + 1)
        self.begins: npt.NDArray[np.int64] = map_array(path, "<i8", offset=begins, count=self.pieces)
        self.lengths: npt.NDArray[np.int32] = map_array(path, "<i4", offset=lengths, count=self.pieces)

    @staticmethod
    def find(path: Path) -> Plan | None:
        """The plan at ``path``; None where there is none, or one that is not what was written, which is looked at up
        to ``WHOLE_BYTES``."""
        try:
            plan, content = Plan(path), map_array(path, "u1")
        except (FileNotFoundError, ValueError):
            return None
        if (
            content.size <= WHOLE_BYTES
            and _hash(content[:-_HASH_BYTES].data).digest() != content[-_HASH_BYTES:].tobytes()
        ):
            return None
        return plan

    @staticmethod
    def write(path: Path, tokens: Tokens, documents: Documents, seq_len: int) -> None:
        """Plan rows of ``seq_len`` labels; of ten million documents it takes seconds, and 1.2 GiB of memory."""
        starts = documents.starts(0, len(documents))
        begins, lengths = cut_documents(starts, np.append(starts[1:], len(tokens)), seq_len)
        row_of, rows = best_fit(lengths, seq_len)
        order, edges = by_rows(row_of, rows)
        hasher = _hash()
        with open(path, "wb") as file:
            for numbers, dtype in (
                (np.array([_FORMAT, rows, len(order), len(documents)]), "<i8"),
                (edges, "<i8"),
                (begins[order], "<i8"),
                (lengths[order], "<i4"),
            ):
                content = numbers.astype(dtype).data
                hasher.update(content)
                file.write(content)
            file.write(hasher.digest())

    def __reduce__(self) -> tuple[type[Plan], tuple[Path]]:
        return Plan, (self.path,)


def _hash(content: bytes | memoryview = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=_HASH_BYTES)


class BestFitRows:
    """Rows of whole documents, put together so that little is left over; each counts its own positions.

    A document longer than a row is cut, each piece of it a row but the last; the input of a piece ends where its last
    label is predicted from, and the next begins at that label. So in an epoch each token of a document but its first
    is a label once. What is left of a row is filled with token 0, a document of its own that counts in no loss.
    """

    def __init__(self, tokens: Tokens, documents: Documents, plan: Plan, *, seq_len: int, shuffle: bool, seed: int):
        self.seq_len, self.rows_per_epoch = seq_len, plan.rows
        facts = (tokens.fingerprint, documents.fingerprint, seq_len, shuffle, seed if shuffle else None)
        self.fingerprint = fingerprint_of("best_fit", _FORMAT, *facts)
        self._tokens, self._plan, self._shuffle, self._seed = tokens, plan, shuffle, seed

    @classmethod
    def plan(
        cls, tokens: Tokens, documents: Documents, *, seq_len: int, shuffle: bool, seed: int, cache_folder: str = ""
    ) -> BestFitRows:
        """The rows by the plan in ``cache_folder``, made now where it is not there, by one of all ranks that want it.

        ConfigError where no document has two tokens, and for a folder that cannot be used.
        """
        folder = cache_path(cache_folder)
        digest = fingerprint_of("best_fit", _FORMAT, documents.fingerprint, len(tokens), seq_len)
        path = folder / f"best-fit-{digest[:20]}.plan"
        with kept_in(folder, "plans of rows"):
            plan = Plan.find(path)
            if plan is None:
                if path.exists():
                    logger.warning(f"the plan {path} is damaged, or of an older version: making it again")
                logger.info(f"planning rows of {seq_len:,} tokens for {len(documents):,} documents, once, into {path}")
                make_together(
                    path.with_suffix(".work"),
                    1,
                    make=lambda _, part: Plan.write(part, tokens, documents, seq_len),
                    assemble=lambda parts: os.replace(parts[0], path),
                    finished=lambda: Plan.find(path) is not None,
                )
                plan = Plan(path)
        if not plan.rows:
            raise ConfigError(KEY, "no document has two tokens, and of a single one nothing is to be learned")
        labels = int(plan.lengths.sum(dtype=np.int64))
        logger.info(
            f"best_fit: {plan.rows:,} rows of {seq_len:,} tokens hold {plan.pieces:,} pieces of {plan.documents:,} "
            f"documents; {100 * (1 - labels / (plan.rows * seq_len)):.2f} % is padding"
        )
        return cls(tokens, documents, plan, seq_len=seq_len, shuffle=shuffle, seed=seed)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, place = place_of(row, self.rows_per_epoch, shuffle=self._shuffle, seed=self._seed)
        pieces = slice(*self._plan.edges[place : place + 2].tolist())
        lengths = self._plan.lengths[pieces].astype(np.int64)
        ends = np.cumsum(lengths)
        tokens = np.zeros(self.seq_len, np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX)
        for begin, length, end in zip(self._plan.begins[pieces].tolist(), lengths.tolist(), ends.tolist(), strict=True):
            piece = self._tokens.window(begin, length + 1)
            tokens[end - length : end], labels[end - length : end] = piece[:-1], piece[1:]
        positions = restart_at(ends, self.seq_len)
        return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions)
