"""A schedule of the user's own: what each rank computes, read from a CSV file and checked before any process talks.

The format is the one that torch's schedules dump as "compute_only": a row a rank, in each cell an action such as
``0F3`` (stage, kind, micro-batch), ``(0F3;3B1)OVERLAP_F_B`` or nothing. What an order costs is in ``schedules.py``.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan.distributed.schedules import Action, Order, Step, Stuck, bubble
from torchtitan.errors import ConfigError

KEY = "parallelism.pipeline_parallel_schedule_csv"

_ACTION = re.compile(r"(\d{1,6})(F|B|I|W)(\d{1,6})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")


def read_order(path: str, ranks: int) -> Order:
    """The order in the file at ``path`` for a pipeline of ``ranks``; ConfigError, in one line, for whatever would fail
    when it runs."""
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(KEY, f"{path} is no file")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin theirs with a mark
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(KEY, f"{path} is no CSV file: {error}") from None
    while rows and not any(rows[-1]):
        rows.pop()
    name = Path(path).name
    if len(rows) != ranks:
        raise ConfigError(
            KEY,
            f"{name} has {len(rows)} rows, one for each rank, but parallelism.pipeline_parallel_degree={ranks}; change "
            "the degree or the file",
        )
    try:
        order = tuple(tuple(_steps(row, rank)) for rank, row in enumerate(rows))
        _check_actions(order)
        bubble(order)
    except _Wrong as wrong:
        raise ConfigError(KEY, f"{name}: {wrong}") from None
    except Stuck as stuck:
        raise ConfigError(KEY, f"{name}: {stuck}; change their order") from None
    return order


class _Wrong(Exception):
    """What is wrong in a file, and what to do."""


def _steps(row: list[str], rank: int) -> Iterator[Step]:
    for column, cell in enumerate(row):
        if cell:
            yield _step(cell, f"row {rank + 1}, column {column + 1}")


def _step(cell: str, place: str) -> Step:
    if match := _ACTION.fullmatch(cell):
        return (_action(match),)
    if match := _OVERLAP.fullmatch(cell):
        parts = [_ACTION.fullmatch(part.strip()) for part in match.groups()]
        step = tuple(_action(part) for part in parts if part)
        if len(step) == 2 and (step[0].kind == "F") != (step[1].kind == "F") and not any(a.kind == "W" for a in step):
            return step
        raise _Wrong(f"{place}: {cell} does not overlap a forward and a backward pass, as (0F3;3B1)OVERLAP_F_B does")
    if _COMMUNICATION.fullmatch(cell):
        raise _Wrong(f"{place}: {cell} is communication, which is put in when the file is read; dump it compute_only")
    shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
    raise _Wrong(f"{place}: {shown!r} is no action; write stage, one of F B I W, micro-batch, such as 0F3")


def _action(match: re.Match[str]) -> Action:
    stage, kind, micro_batch = match.groups()
    return Action(kind, int(stage), int(micro_batch))


def _check_actions(order: Order) -> None:
    """All actions are there, once each, and a stage on one rank."""
    owner: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, steps in enumerate(order):
        if not steps:
            raise _Wrong(f"row {rank + 1} is empty; give the rank a stage, or lower the degree")
        for action in (action for step in steps for action in step):
            if action in seen:
                raise _Wrong(f"row {rank + 1}: {action} comes twice; leave out one")
            if owner.setdefault(action.stage, rank) != rank:
                raise _Wrong(
                    f"row {rank + 1}: {action} is of stage {action.stage}, which row {owner[action.stage] + 1} has; "
                    "a stage is on one rank"
                )
            seen.add(action)
    if absent := sorted(set(range(max(owner))) - set(owner)):
        raise _Wrong(f"stage {absent[0]} is missing, though there is a stage {max(owner)}; number the stages from 0")
    for stage in sorted(owner):
        for micro_batch in range(1 + max(action.micro_batch for action in seen)):
            _check_passes(stage, micro_batch, {kind for kind in "FBIW" if Action(kind, stage, micro_batch) in seen})
    # Torch counts losses as they come.
    forward = [a.micro_batch for step in order[owner[max(owner)]] for a in step if a[:2] == ("F", max(owner))]
    if forward != sorted(forward):
        late = next(m for m, expected in zip(forward, sorted(forward), strict=True) if m != expected)
        raise _Wrong(f"{max(owner)}F{late} comes too early; the last stage takes its micro-batches in their order")


def _check_passes(stage: int, micro_batch: int, kinds: set[str]) -> None:
    missing = ({"F"} - kinds) or ({"I", "W"} - kinds if kinds & {"I", "W"} else {"B"} - kinds)
    if missing:
        absent = " and ".join(f"{stage}{kind}{micro_batch}" for kind in sorted(missing))
        raise _Wrong(f"{absent} is missing; each stage needs F and either B, or I and W, of every micro-batch")
    if {"B", "I"} <= kinds:
        raise _Wrong(f"{stage}B{micro_batch} and {stage}I{micro_batch} are two backward passes; leave out one")
