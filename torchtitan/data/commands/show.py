"""``show``: the rows of a step as the model gets them.

How rows come about is in rows/; which rank gets which is in loader.py.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan.config import load_config
from torchtitan.errors import ConfigError

if TYPE_CHECKING:  # torch costs seconds, and help is given before
    from torchtitan.data.tokenizer import Tokenizer
    from torchtitan.resolve.job import Job

_SHOWN_CHARACTERS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    parser.add_argument("--rows", type=int, metavar="K", help="its first K rows (default: all)")
    parser.add_argument("--tokens", action="store_true", help="every token with its id, position and label")
    parser.add_argument("--json", action="store_true", help="for machines; with every token")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the rows; ConfigError where the configuration or its data cannot be used."""
    for name in ("step", "rows"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise ConfigError(f"--{name}", f"{number} must be at least 1")
    config = load_config(overrides)
    from torchtitan.resolve.job import resolve_job  # needs torch

    ranks = os.environ.get("NGPU", "1")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ConfigError(None, f"NGPU={ranks} in the environment is no number of ranks")
    job = resolve_job(config, int(ranks))
    rows = _rows(job, arguments.step, arguments.rows)
    if arguments.json:
        print(json.dumps([{**row, "text": _text(job.tokenizer, row["tokens"])} for row in rows], indent=1))
        return 0
    for row in rows:
        print("\n".join(_lines(row, job.tokenizer, tokens=arguments.tokens)))
    return 0


def _rows(job: Job, step: int, most: int | None) -> Iterator[dict[str, Any]]:
    """The rows of ``step`` in their global order, the first ``most`` of them."""
    from torchtitan.data.batch import IGNORE_INDEX
    from torchtitan.feed import blended, data_stages, open_rows
    from torchtitan.state import DataPosition

    training = job.config.training
    of_a_step = training.global_batch_size
    if of_a_step == -1:
        of_a_step = training.local_batch_size * job.spread.degrees.readers
    sources = open_rows(job)
    mixture = blended(job, sources, DataPosition(data_stages(job, sources)).place_stages(0, of_a_step))
    first = (step - 1) * of_a_step
    for row in range(first, first + min(of_a_step, most or of_a_step)):
        tokens, labels, positions = (part.tolist() for part in mixture[row])
        source, own = mixture.place(row)
        yield {
            "row": row,
            "source": source,
            "row_of_source": own,
            "valid": sum(label != IGNORE_INDEX for label in labels),
            "documents": sum(position == 0 for position in positions),
            "tokens": tokens,
            "positions": positions,
            "labels": labels,
        }


def _lines(row: Mapping[str, Any], tokenizer: Tokenizer | None, *, tokens: bool) -> Iterator[str]:
    ids = row["tokens"]
    yield (
        f"row {row['row']}: row {row['row_of_source']} of {row['source']}, {len(ids)} tokens, "
        f"{row['valid']} labels count, positions begin {row['documents']} times"
    )
    if not tokens:
        text = _text(tokenizer, ids)
        yield f"  {_brief(str(ids)) if text is None else _brief(repr(text))}"
        return
    for token, position, label in zip(ids, row["positions"], row["labels"], strict=True):
        piece = _text(tokenizer, [token])
        yield f"  {token:>8} {position:>8} {label:>8}  {'' if piece is None else repr(piece)}"


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids)


def _brief(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
