"""What was found in checkpoints, as lines for people and as JSON for machines.

Nothing is looked up here that its argument does not hold; what is looked for is in ``inventory.py``,
``verification.py`` and ``comparison.py``.
"""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.inspect.comparison import Comparison, Difference, numbers
from torchtitan.checkpoint.inspect.inventory import Step, dtype_name, newest
from torchtitan.checkpoint.inspect.verification import Verdict
from torchtitan.checkpoint.places import shown_bytes, storage_errors
from torchtitan.checkpoint.storage import METADATA
from torchtitan.errors import CheckpointError

_STATES, _GROUPS = "optimizer.state.", "optimizer.param_groups."
_LONGEST = 20  # names in one list


# The steps that are there


def overview(steps: Sequence[Step]) -> Iterator[str]:
    """One line a step; the newest complete one has a star."""
    best = newest(steps)
    head = ("", "step", "size", "files", "tensors", "parameters", "dtype", "written", "state")
    rows = [head, *(_row(step, marked=step is best) for step in steps)]
    yield from _aligned(rows, right={1, 2, 3, 4, 5})
    if best is not None:
        yield "* is where a start goes on, if its files are what their hashes say (verify)"


def _row(step: Step, *, marked: bool) -> tuple[str, ...]:
    inside = step.contents
    tensors, parameters, dtypes = (
        ("", "", "") if inside is None else _told(inside.tensors, inside.parameters, inside.dtypes)
    )
    unreadable = "; its index cannot be read" * (inside is None and METADATA in step.files)
    named = "" if step.number is None or step.folder.name == f"step-{step.number}" else f" ({step.folder.name})"
    size, files = shown_bytes(sum(step.files.values())), str(len(step.files))
    number = "" if step.number is None else str(step.number)
    return (
        "*" * marked,
        number,
        size,
        files,
        tensors,
        parameters,
        dtypes,
        _time(step.written),
        step.note + unreadable + named,
    )


def as_json(step: Step, *, inside: bool = False) -> dict[str, Any]:
    """``inside`` with every key."""
    contents = step.contents
    told: dict[str, Any] = {
        "folder": str(step.folder),
        "step": step.number,
        "state": step.state,
        "note": step.note,
        "bytes": sum(step.files.values()),
        "files": len(step.files),
        "written": None if step.written is None else _utc(step.written),
        "tensors": contents and contents.tensors,
        "parameters": contents and contents.parameters,
        "dtypes": contents and contents.dtypes,
    }
    if inside:
        reader = step.reader
        told["keys"] = {} if reader is None else {name: _shape(reader, name) for name in sorted(reader.tensors)}
        told["values"] = [] if reader is None else sorted(reader.values)
        told["numbers"] = {} if reader is None and step.manifest is None else numbers(step)
        told["file_bytes"] = step.files
    return told


# What one holds


def inside(step: Step, *, everything: bool = False, config: bool = False) -> Iterator[str]:
    """Keys, totals and numbers of one step. CheckpointError where they cannot be read."""
    yield f"{step.folder}: {step.note}"
    written = "" if step.written is None else f", written {_time(step.written)}"
    yield f"{shown_bytes(sum(step.files.values()))} in {len(step.files)} files{written}"
    reader = step.reader
    if reader is not None:
        contents = step.contents
        assert contents is not None
        tensors, parameters, dtypes = _told(contents.tensors, contents.parameters, contents.dtypes)
        yield f"{tensors} tensors, of which {len(reader.weights)} are weights: {parameters} parameters in {dtypes}"
        yield ""
        yield from _aligned(list(_keys(reader, everything)), right=set())
        yield from _values(reader, everything)
    if told := numbers(step) if reader is not None or step.manifest is not None else {}:
        yield ""
        yield from _aligned([(name, str(value)) for name, value in told.items()], right=set())
    if config:
        path = step.folder / "config.toml"
        if not path.is_file():
            raise CheckpointError(f"{step.folder} holds no config.toml")
        yield ""
        with storage_errors(path):
            yield path.read_text().rstrip()


def _keys(reader: Reader, everything: bool) -> Iterator[tuple[str, ...]]:
    """Name, shape and dtype of each tensor; unless ``everything`` is asked for, an optimizer's beside the weight's."""
    folded: dict[str, list[str]] = {}
    if not everything:
        for name in reader.tensors:
            parameter, _, state = name.removeprefix(_STATES).rpartition(".")
            if name.startswith(_STATES) and parameter in reader.tensors:
                folded.setdefault(parameter, []).append(state)
    hidden = {f"{_STATES}{parameter}.{state}" for parameter, states in folded.items() for state in states}
    for name in sorted(set(reader.tensors) - hidden, key=lambda name: (name not in reader.weights, _natural(name))):
        shape = _shape(reader, name)
        yield (
            name,
            str(shape["shape"]),
            shape["dtype"],
            "+ " * (name in folded) + ", ".join(sorted(folded.get(name, ()))),
        )


def _values(reader: Reader, everything: bool) -> Iterator[str]:
    names = sorted(reader.values, key=_natural)
    if not names:
        return
    yield ""
    if everything:
        yield from names
        return
    groups = sum(name.startswith(_GROUPS) for name in names)
    shown = [name for name in names if not name.startswith(_GROUPS)]
    yield f"{len(names)} values: {_some(shown + [f'{groups} below {_GROUPS}'] * bool(groups))}"


# Whether it is sound


def verdicts(found: Sequence[Verdict], passed_over: Sequence[Step]) -> Iterator[str]:
    """What is wrong with each, and those that were not looked at."""
    for verdict in found:
        step = verdict.step
        size = f"{shown_bytes(sum(step.files.values()))} in {len(step.files)} files"
        sound = "as written" if step.manifest is not None else "nothing wrong"
        yield f"{step.folder}: {'DAMAGED' if verdict.damage else sound}, {size}"
        yield from (f"  {problem}" for problem in verdict.damage)
        yield from (f"  note: {note}" for note in verdict.notes)
    yield from (f"{step.folder}: not looked at ({step.note})" for step in passed_over)


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """A step with what is wrong with it."""
    return {**as_json(verdict.step), "damage": verdict.damage, "notes": verdict.notes}


# In what two differ


def comparison(first: Step, second: Step, found: Comparison) -> Iterator[str]:
    """What differs, and how much is equal."""
    yield f"A  {first.folder}"
    yield f"B  {second.folder}"
    for letter, names in zip("AB", found.only, strict=True):
        if names:
            yield f"only in {letter}: {_some(names)}"
    tensors = sorted(found.tensors, key=lambda d: (d.name.startswith(_STATES), _natural(d.name)))
    rows = [_difference_row(d) for d in tensors if found.differs(d) or d.differing or d.dtypes[0] != d.dtypes[1]]
    if rows:
        head = ("", "largest difference", "relative", "elements that differ", "")
        yield ""
        yield from _aligned([head, *rows], right={1, 2, 3})
        yield ""
    same_bits, same = (sum(d.same_bits for d in found.tensors), sum(not found.differs(d) for d in found.tensors))
    within = " within the tolerance" * found.tolerant
    yield f"{len(found.tensors)} tensors in both: {same} equal{within}, {same_bits} of them to the bit"
    if nans := sum(d.nans for d in found.tensors):
        yield f"{nans} elements are NaN in both, which counts as equal"
    for name, (one, two) in found.numbers.items():
        yield f"{name}: {one} in A, {two} in B"
    yield "equal" if found.equal else "different"


def _difference_row(d: Difference) -> tuple[str, ...]:
    dtypes = "" if d.dtypes[0] == d.dtypes[1] else f"{d.dtypes[0]} in A, {d.dtypes[1]} in B"
    if not d.comparable:
        return d.name, "", "", "", f"{d.shapes[0]} in A, {d.shapes[1]} in B"
    notes = [dtypes] * bool(dtypes) + [f"{d.nans_in_one} NaN in one"] * bool(d.nans_in_one)
    counts = f"{d.differing:,} of {d.elements:,}"
    return d.name, f"{d.largest:.3g}", f"{d.relative:.3g}", counts, "; ".join(notes)


def comparison_as_json(first: Step, second: Step, found: Comparison) -> dict[str, Any]:
    """Every tensor that both hold, and what only one does."""
    return {
        "a": str(first.folder),
        "b": str(second.folder),
        "equal": found.equal,
        "only_in_a": found.only[0],
        "only_in_b": found.only[1],
        "tensors": {d.name: _difference_as_json(d, found.differs(d)) for d in found.tensors},
        "numbers": {name: list(pair) for name, pair in found.numbers.items()},
    }


def _difference_as_json(d: Difference, differs: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"differs": differs, "shapes": d.shapes, "dtypes": d.dtypes}
    if d.comparable:
        told |= {"elements": d.elements, "differing": d.differing, "outside": d.outside, "same_bits": d.same_bits}
        told |= {"largest": d.largest, "relative": d.relative, "magnitude": d.magnitude}
        told |= {"nans": d.nans, "nans_in_one": d.nans_in_one}
    return told


# One cell


def _aligned(rows: Sequence[Sequence[str]], *, right: set[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(range(len(row)), row, widths, strict=True)
        yield "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, c, w in cells).rstrip()


def _shape(reader: Reader, name: str) -> dict[str, Any]:
    entry = reader.tensors[name]
    return {"shape": list(entry.size), "dtype": dtype_name(entry.properties.dtype)}


def _told(tensors: int, parameters: int, dtypes: Sequence[str]) -> tuple[str, str, str]:
    return f"{tensors:,}", f"{parameters:,}", ", ".join(dtypes)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LONGEST} more" if len(names) > _LONGEST else ""
    return ", ".join(names[:_LONGEST]) + more


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Layer 10 comes after layer 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def json_text(value: Any) -> str:
    """``value`` as JSON that every reader takes: null stands for a number that is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=1, allow_nan=False)
