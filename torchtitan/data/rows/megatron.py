"""The samples of Megatron-LM's GPTDataset, and of its blends, in their order: ``data.order = "source"``.

The files are read in ``tokens/megatron.py``; which rows a rank takes is in ``loader.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.data.rows.greedy import greedy_blend, normalized
from torchtitan.data.rows.rows import fingerprint_of, shifted
from torchtitan.data.rows.tables import Tables, beyond, open_tables
from torchtitan.data.tokens.megatron import IndexedFile, split_range
from torchtitan.errors import ConfigError

# A last epoch that gives less than this share of its samples is shuffled by itself.
_SEPARATE_BELOW = 0.80
# A blend asks each set for a little more than its share.
_MORE = 1.005


@dataclass(frozen=True)
class Epochs:
    """How often the data is gone through for the samples that are wanted."""

    number: int
    separate: int
    """Samples of all epochs but the last, where that is shuffled by itself; else 0."""

    @staticmethod
    def needed(samples: int, *, tokens: int, seq_len: int) -> Epochs:
        """For ``samples`` of ``seq_len`` tokens, of ``tokens`` in an epoch."""
        number = max(1, -(-(samples * seq_len + 1) // tokens))
        if number == 1:
            return Epochs(1, 0)
        before = ((number - 1) * tokens - 1) // seq_len
        separate = samples - before < int(_SEPARATE_BELOW * ((tokens - 1) // seq_len))
        return Epochs(number, before if separate else 0)


def sample_tables(
    sequences: range, lengths: npt.NDArray[Any], epochs: Epochs, *, seq_len: int, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """The three tables of a GPTDataset over ``sequences`` of ``lengths`` tokens.

    ``documents`` int32 ``[epochs × sequences]``: the sequences in the order of the stream. ``samples`` ``[n + 1, 2]``:
    place in it and token of that sequence with which sample j begins. ``shuffled`` ``[n]``: which of them is k-th.
    """
    random = np.random.RandomState(seed)
    ids = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    repeats = [epochs.number - 1, 1] if epochs.separate else [epochs.number]
    streams = [np.tile(ids, number) for number in repeats]
    for stream in streams:
        random.shuffle(stream)
    documents = np.concatenate(streams)

    sizes = lengths[documents - sequences.start].astype(np.int64)
    ends = np.cumsum(sizes)
    number = (int(ends[-1]) - 1) // seq_len
    begins = np.arange(number + 1, dtype=np.int64) * seq_len
    places = np.searchsorted(ends, begins, side="right")
    samples = np.stack([places, begins - (ends - sizes)[places]], axis=1)

    shuffled: npt.NDArray[Any] = np.arange(number, dtype=np.uint32 if number < (1 << 32) - 1 else np.int64)
    for stream in (shuffled[: epochs.separate], shuffled[epochs.separate :]) if epochs.separate else (shuffled,):
        random.shuffle(stream)
    return {
        "documents": documents,
        "samples": samples.astype(np.int32 if len(documents) < 1 << 31 else np.int64),
        "shuffled": shuffled,
    }


class GptRows:
    """Row k is sample k of a GPTDataset that was built for ``samples`` of them.

    Sequences, not documents, are shuffled, once for all epochs; samples share one token with the next one and may
    reach over the ends of sequences; attention and the loss know nothing of these, as without the flags that change it.
    """

    def __init__(
        self,
        tokens: IndexedFile,
        *,
        seq_len: int,
        samples: int,
        seed: int,
        split: str,
        part: str = "train",
        cache_folder: str = "",
    ) -> None:
        header = tokens.header
        self._made_of = dict(
            seq_len=seq_len, samples=samples, seed=seed, split=split, part=part, cache_folder=cache_folder
        )
        self._tokens, self.seq_len = tokens, seq_len
        self._lengths = header.lengths()
        first, last = split_range(split, part, header.sequences)
        available = tokens.begin(last) - tokens.begin(first)
        if available <= seq_len:
            raise ConfigError(
                "data.args.split",
                f"{split!r} gives {part} {available:,} tokens in {last - first:,} of {header.sequences:,} sequences, "
                f"and a sample takes {seq_len + 1:,}",
            )
        epochs = Epochs.needed(samples, tokens=available, seq_len=seq_len)
        facts = (tokens.fingerprint, tokens.documents.fingerprint, seq_len, first, last, seed, epochs)
        self.fingerprint = fingerprint_of("GPTDataset", *facts)
        self.tables: Tables = open_tables(
            "GPTDataset",
            facts,
            lambda: sample_tables(range(first, last), self._lengths[first:last], epochs, seq_len=seq_len, seed=seed),
            cache_folder=cache_folder,
        )
        self._documents, self._samples, self._shuffled = (
            self.tables[name] for name in ("documents", "samples", "shuffled")
        )
        self.rows_per_epoch = (available - 1) // seq_len
        self._positions = torch.arange(seq_len)

    def __reduce__(self) -> Any:
        return _again, (self._tokens, self._made_of)

    def __len__(self) -> int:
        """How many rows there are: at least the samples asked for."""
        return len(self._shuffled)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not 0 <= row < len(self):
            raise beyond(row, len(self))
        sample = int(self._shuffled[row])
        (place, offset), (last_place, last_offset) = self._samples[sample : sample + 2].tolist()
        pieces = []
        for sequence in self._documents[place : last_place + 1].tolist():
            stop = last_offset + 1 if place == last_place else int(self._lengths[sequence])
            pieces.append(self._tokens.window(self._tokens.begin(sequence) + offset, stop - offset))
            place, offset = place + 1, 0
        window = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return *shifted(window), self._positions


def _again(tokens: IndexedFile, options: dict[str, Any]) -> GptRows:
    return GptRows(tokens, **options)


def blend_tables(weights: Sequence[float], samples: int) -> dict[str, npt.NDArray[Any]]:
    """Which set gives each sample of a blend, and which of its samples that is, ``[samples]`` each."""
    # Divided by their sum twice, as there: it shows where the sum of the quotients is not one.
    chosen, before = greedy_blend(normalized(normalized(weights)), samples)
    return {"chosen": chosen, "own": before}


def samples_of(share: float, samples: int) -> int:
    """How many samples a set of a blend is built for."""
    return math.ceil(math.ceil(samples * share) * _MORE)
