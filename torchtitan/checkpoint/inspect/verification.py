"""Whether the files of a step are what was written: each against the manifest, the index against the files.

Which steps there are is in ``inventory.py``.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.inspect.inventory import Step
from torchtitan.checkpoint.manifest import MANIFEST, damages
from torchtitan.checkpoint.places import storage_errors
from torchtitan.checkpoint.storage import BEING_WRITTEN, METADATA
from torchtitan.errors import CheckpointError, brief, one_line


@dataclass
class Verdict:
    """Of one step: every thing that is wrong, and what is worth knowing."""

    step: Step
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(step: Step, *, seen: Callable[[int], object] = lambda size: None) -> Verdict:
    """Read every file of ``step``; ``seen`` is told the bytes of each that was read."""
    verdict = Verdict(step)
    if step.state == "damaged":
        verdict.damage.append(step.note)
    elif step.manifest is None:
        verdict.notes.append("no manifest, so there are no hashes; only that each entry lies inside its file is known")
    damaged: set[str] = set()
    if step.manifest is not None:
        for name, size in step.files.items():
            if found := list(damages(step.folder, step.manifest, [name])):
                verdict.damage += found
                damaged.add(name)
            seen(size)
        verdict.notes += [f"{brief(name)} is not in the manifest" for name in _others(step)]
    if METADATA not in damaged and (step.folder / METADATA).is_file():
        verdict.damage += _damage_of_index(step, without=damaged)
    return verdict


def _others(step: Step) -> list[str]:
    ours = {*step.files, MANIFEST, BEING_WRITTEN}
    with storage_errors(step.folder):
        return sorted(entry.name for entry in step.folder.iterdir() if entry.name not in ours)


def _damage_of_index(step: Step, *, without: Collection[str]) -> list[str]:
    """What is wrong with the index, and for each file but those ``without`` the first entry that lies outside of it."""
    try:
        reader = Reader(step.folder)
    except CheckpointError as error:
        return [str(error)]
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}
    for name, entry in reader.index.entries():
        path = step.folder / entry.file
        if entry.file in without or entry.file in problems:
            continue
        try:
            if entry.file not in sizes:
                with storage_errors(step.folder):
                    sizes[entry.file] = path.stat().st_size
        except OSError as error:
            problems[entry.file] = f"{path} cannot be read: {error.strerror or one_line(error)}"
            continue
        if entry.offset + entry.length > sizes[entry.file]:
            problems[entry.file] = f"{path} has {sizes[entry.file]} bytes, and {name} is said to lie beyond them"
    return list(problems.values())
