"""Which folders count as checkpoints, whatever was interrupted, damaged or left over."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from torchtitan.checkpoint import storage
from torchtitan.checkpoint.manifest import FORMAT, MANIFEST, Manifest, damage
from torchtitan.checkpoint.places import FileRecord, share
from torchtitan.checkpoint.storage import StepFolders
from torchtitan.errors import CheckpointError


def write(folders: StepFolders, step: int, content: bytes = b"weights") -> None:
    folder = prepare(folders, step)
    (folder / "a.bin").write_bytes(content)
    (folder / "b.bin").write_bytes(b"more")
    files = {name: FileRecord.of(folder / name) for name in ("a.bin", "b.bin")}
    Manifest(step, {"train_state": {"step": step}}, files).write(folder)
    folders.commit(folders.path(step))


def prepare(folders: StepFolders, step: int) -> UPath:
    folders.prepare(folders.path(step))
    return folders.partial(folders.path(step))


@pytest.fixture
def folders(tmp_path: Path) -> StepFolders:
    return StepFolders(UPath(tmp_path) / "checkpoint")


def test_only_complete_steps_count(folders: StepFolders) -> None:
    assert folders.steps() == []
    for step in (5, 10, 100):
        write(folders, step)
    prepare(folders, 15)  # killed while it wrote
    folders.path(20).mkdir()  # no manifest
    (folders.root / "step-x").mkdir()
    (folders.root / "step-25").write_text("a file")
    assert folders.steps() == [5, 10, 100]
    assert folders.incomplete() == [20]


def test_a_manifest_reads_back(folders: StepFolders) -> None:
    write(folders, 5)
    manifest = Manifest.read(folders.path(5))
    assert (manifest.step, manifest.state["train_state"], manifest.format) == (5, {"step": 5}, FORMAT)
    assert damage(folders.path(5), manifest, manifest.files) is None


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../x": {"bytes": 0, "sha256": ""}}},
        {"files": {"/dev/zero": {"bytes": 0, "sha256": ""}}},
        {"files": {"a": {"bytes": "0", "sha256": ""}}},
        {"step": "5"},
        {"step": -1},
        {"state": []},
        {"state": {"start": 3}},
        {"files": None},
    ],
    ids=str,
)
def test_a_manifest_of_a_stranger_is_held_against_what_one_says(folders: StepFolders, change: dict[str, Any]) -> None:
    write(folders, 5)
    path = folders.path(5) / MANIFEST
    content = json.loads(path.read_text()) | change
    del content["sha256"]
    sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": sha256}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(folders.path(5))


@pytest.mark.parametrize("name", ["a.bin", "b.bin"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damage_is_named(folders: StepFolders, name: str, how: str) -> None:
    write(folders, 5)
    path = folders.path(5) / name
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[0] ^= 1
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    problem = damage(folders.path(5), Manifest.read(folders.path(5)), ["a.bin", "b.bin"])
    assert problem is not None and str(path) in problem


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        " " * (33 << 20),
        '{"format": 1}',
        '{"format": 1, "step": 1, "state": {}, "files": {"a": 3}}',
    ],
    ids=len,
)
def test_an_unreadable_manifest_is_an_error(folders: StepFolders, text: str) -> None:
    write(folders, 5)
    (folders.path(5) / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(folders.path(5))


def test_a_newer_format_is_refused(folders: StepFolders) -> None:
    write(folders, 5)
    path = folders.path(5) / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1}))
    with pytest.raises(CheckpointError, match="update torchtitan"):
        Manifest.read(folders.path(5))


def test_a_step_is_replaced_at_once_or_not_at_all(folders: StepFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folders, 5, b"old")
    renames: list[str] = []
    local = type(folders.root)
    rename = local.rename

    def stop_after_one(self: Path, target: Path) -> Path:
        renames.append(self.name)
        if len(renames) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    folder = prepare(folders, 5)
    (folder / "a.bin").write_bytes(b"new")
    Manifest(5, {}, {"a.bin": FileRecord.of(folder / "a.bin")}).write(folder)
    monkeypatch.setattr(local, "rename", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        folders.commit(folders.path(5))
    monkeypatch.setattr(local, "rename", rename)
    assert folders.steps() == []
    folders.recover()
    assert folders.steps() == [5]
    assert (folders.path(5) / "a.bin").read_bytes() == b"old"
    write(folders, 5, b"new")
    assert (folders.path(5) / "a.bin").read_bytes() == b"new"
    assert [p.name for p in folders.root.iterdir()] == ["step-5"]


def test_retention_keeps_the_newest(folders: StepFolders) -> None:
    for step in (5, 10, 15, 20):
        write(folders, step)
    folders.retain(0)
    assert folders.steps() == [5, 10, 15, 20]
    folders.retain(2)
    assert sorted(p.name for p in folders.root.iterdir()) == ["step-15", "step-20"]


def test_what_others_put_there_is_not_deleted(folders: StepFolders, tmp_path: Path) -> None:
    others = ("step-5-mine.partial", "step-x.removing", "step-007", "mine.replaced", "step-5.superseded")
    for name in others:
        (folders.root / name).mkdir(parents=True)
    write(folders, 5)
    folders.path(5).rename(tmp_path / "elsewhere")
    folders.path(5).symlink_to(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", folders.root / "step-010")
    for step in (10, 15):
        write(folders, step)
    assert folders.steps() == [5, 10, 15]
    folders.retain(2)
    assert sorted(p.name for p in folders.root.iterdir()) == sorted([*others, "step-010", "step-10", "step-15"])
    assert {p.name for p in (tmp_path / "elsewhere").iterdir()} == {"a.bin", "b.bin", MANIFEST}


def test_a_start_sweeps_what_killed_saves_left(folders: StepFolders) -> None:
    write(folders, 5)
    for name in ("step-10.partial", "step-2.removing", "step-5.replaced", "step-5-export.partial"):
        (folders.root / name).mkdir()
    folders.recover()
    assert [p.name for p in folders.root.iterdir()] == ["step-5"]


def test_retention_keeps_multiples_for_good(folders: StepFolders) -> None:
    for step in (5, 10, 15, 20, 25, 30):
        write(folders, step)
        folders.retain(2, 10)
    assert folders.steps() == [10, 20, 25, 30]


def test_leftovers_are_swept_and_no_step_with_them(folders: StepFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 10, 15):
        write(folders, step)
    prepare(folders, 17)
    folders.path(5).rename(folders.root / "step-5.removing")
    folders.sweep()
    assert sorted(p.name for p in folders.root.iterdir()) == ["step-10", "step-15"]

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("somebody else's")

    prepare(folders, 17)
    monkeypatch.setattr(storage, "remove", refused)
    folders.sweep()  # costs a warning
    assert (folders.root / "step-17.partial").exists()


def test_going_back_sets_later_steps_aside(folders: StepFolders) -> None:
    for step in (5, 10, 15):
        write(folders, step)
    assert folders.set_aside_after(5) == [10, 15]
    assert folders.steps() == [5]
    assert (folders.root / "step-10.superseded" / MANIFEST).exists()


def test_files_are_shared_out_once() -> None:
    names = [f"f{n}" for n in range(7)]
    assert sorted(name for rank in range(3) for name in share(names, rank, 3)) == names
