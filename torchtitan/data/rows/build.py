"""build_rows(): the one place that picks what a row is, of those to train on and of those to look at once.

What makes up a row of a kind is in the module of that kind.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from torchtitan.data.files import KEY
from torchtitan.data.rows.best_fit import BestFitRows
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.rows.documents import DocumentRows
from torchtitan.data.rows.rows import SourceRows, Windows
from torchtitan.data.rows.stream import StreamRows
from torchtitan.data.rows.validation import OneEpoch, RowsOnce, WindowsOnce
from torchtitan.data.tokens.store import Documents, Tokens
from torchtitan.data.tokens.stream import StreamTokens
from torchtitan.errors import ConfigError

Packing = Literal["concat", "documents", "best_fit"]


def build_rows(
    tokens: Tokens, *, packing: Packing, seq_len: int, shuffle: bool, seed: int, cache_folder: str = ""
) -> SourceRows:
    """Rows of ``seq_len`` tokens; ``cache_folder`` (empty: the user's) keeps what ``packing`` has to plan.

    Needs no process group: ranks on one file system plan together, once. ConfigError where ``packing`` needs to know
    where documents begin and nothing says it, where nothing is left of them, and for a folder that cannot be used.
    """
    if isinstance(tokens, StreamTokens):
        if packing == "best_fit":
            raise ConfigError(
                "data.packing",
                '"best_fit" needs to know all documents, and those of a stream come while training goes on; '
                'set data.args.streaming = false, or this to "documents"',
            )
        windows: Windows = StreamRows(tokens, seq_len=seq_len, shuffle=shuffle, seed=seed)
    elif packing == "best_fit":
        return BestFitRows.plan(
            tokens,
            _documents_of(tokens, packing),
            seq_len=seq_len,
            shuffle=shuffle,
            seed=seed,
            cache_folder=cache_folder,
        )
    else:
        windows = ConcatRows(tokens, seq_len=seq_len, shuffle=shuffle, seed=seed)
    return windows if packing == "concat" else DocumentRows(windows, _documents_of(tokens, packing))


def build_rows_once(tokens: Tokens, *, packing: Packing, seq_len: int, cache_folder: str = "") -> RowsOnce:
    """The same, but rows that end, in which every token is the label of one place, but for the first of the data and,
    where documents are kept apart, of each. ConfigError also where a single token is all there is."""
    if packing == "best_fit":
        rows = build_rows(tokens, packing=packing, seq_len=seq_len, shuffle=False, seed=0, cache_folder=cache_folder)
        return functools.partial(OneEpoch, rows)
    if packing == "documents":
        _documents_of(tokens, packing)
    windows = functools.partial(WindowsOnce, tokens, apart=packing == "documents", seq_len=seq_len)
    if not isinstance(tokens, StreamTokens):
        windows()  # tells what is wrong with it
    return windows


def _documents_of(tokens: Tokens, packing: Packing) -> Documents:
    if tokens.documents is None:
        raise ConfigError(
            "data.packing",
            f'"{packing}" needs to know where documents begin, and the token files have no index that says so; '
            'bring it, or set this to "concat"',
        )
    documents = tokens.documents
    # More tokens than documents: one of these has two.
    if not isinstance(tokens, StreamTokens) and len(tokens) <= len(documents):
        starts = documents.starts(0, len(documents))
        if np.diff(starts, append=len(tokens)).max() < 2:
            raise ConfigError(KEY, "no document has two tokens, and of a single one nothing is to be learned")
    return documents
