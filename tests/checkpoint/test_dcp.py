"""Reading distributed checkpoints that were made to do harm, or have rotted: refused in one line, nothing is run."""

import io
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from upath import UPath

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.errors import CheckpointError

WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4)
CALLS = [
    ("os", "system", "touch {}"),
    ("posix", "system", "touch {}"),
    ("builtins", "eval", "open({!r}, 'w')"),
    ("builtins", "exec", "open({!r}, 'w')"),
    ("subprocess", "getoutput", "touch {}"),
    ("torch", "load", "{}"),
    ("torch.serialization", "load", "{}"),
    ("torch.distributed.checkpoint.metadata", "os.system", "touch {}"),
    ("torch", "Size.__class__", "{}"),
    ("pathlib", "Path.touch", "{}"),
]
"""Module, name, argument: each would leave a file of the given name, or is no part of an index."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    state = {"weight": WEIGHT, "half": WEIGHT.bfloat16(), "step": torch.tensor(3.0), "empty": torch.ones(0, 2)}
    dcp.save({**state, "numbers": {"lr": 0.5, "betas": (0.9, 0.95)}}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> UPath:
    return UPath(shutil.copytree(saved, tmp_path / "step-1"))


def refusal(folder: UPath, act: Callable[[Reader], Any] = lambda reader: None) -> str:
    """The one line with which the step in ``folder`` is refused."""
    with pytest.raises(CheckpointError) as raised:
        act(Reader(folder))
    message = str(raised.value)
    assert message.isprintable() and str(folder) in message and "weights_only" not in message
    return message


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls something."""
    text = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name, argument)]
    return b"\x80\x04" + text[0] + text[1] + b"\x93" + text[2] + b"\x85R."


def change(folder: UPath, edit: Callable[[Metadata], Any]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    result = edit(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index if result is None else result))


def put(folder: UPath, name: str, content: bytes) -> None:
    """Let ``content`` be what is stored of ``name``."""

    def edit(index: Metadata) -> None:
        key = next(key for key in index.storage_data if key.fqn == name)
        index.storage_data[key] = replace(index.storage_data[key], offset=0, length=len(content), relative_path="other")

    change(folder, edit)
    (folder / "other").write_bytes(content)


def archive(content: bytes) -> bytes:
    """A file as torch writes them, with ``content`` as its pickle."""
    written, file = io.BytesIO(), io.BytesIO(stored({}))
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    return written.getvalue()


def stored(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_what_was_saved_is_read(folder: UPath) -> None:
    reader = Reader(folder)
    assert set(reader.weights) == {"weight", "half", "step", "empty"}
    assert reader.tensor("weight").equal(WEIGHT) and reader.tensor("half").equal(WEIGHT.bfloat16())
    assert reader.tensor("step").item() == 3.0 and reader.tensor("empty").shape == (0, 2)
    assert reader.read_values(["numbers.lr", "numbers.betas"]) == {"numbers.lr": 0.5, "numbers.betas": (0.9, 0.95)}
    double = torch.zeros(3, 4, dtype=torch.float64)
    reader.read({"weight": double})
    assert double.equal(WEIGHT.double())


@pytest.mark.parametrize(("module", "name", "argument"), CALLS)
def test_an_index_that_would_run_something(
    folder: UPath, tmp_path: Path, module: str, name: str, argument: str
) -> None:
    marker = tmp_path / "ran"
    (folder / ".metadata").write_bytes(call(module, name, argument.format(marker)))
    message = refusal(folder)
    assert ".metadata cannot be read" in message
    assert ("does not belong" in message) or module == "pathlib"  # a path there is one that touches nothing
    assert not marker.exists()


@pytest.mark.parametrize(("module", "name", "argument"), CALLS)
@pytest.mark.parametrize("zipped", [True, False])
def test_an_entry_that_would_run_something(
    folder: UPath, tmp_path: Path, module: str, name: str, argument: str, zipped: bool
) -> None:
    marker = tmp_path / "ran"
    content = call(module, name, argument.format(marker)).ljust(2000, b" ")
    if zipped:
        content = archive(content)
    for target, act in [
        ("weight", lambda reader: reader.tensor("weight")),
        ("numbers.lr", lambda reader: reader.value("numbers.lr")),
    ]:
        put(folder, target, content)
        assert target in refusal(folder, act)
    assert not marker.exists()


def test_a_tensor_said_to_be_a_value_is_not_unpickled(folder: UPath, tmp_path: Path) -> None:
    """What torch would do for any name of which the index says so."""
    marker = tmp_path / "ran"

    def edit(index: Metadata) -> None:
        index.state_dict_metadata["weight"] = BytesStorageMetadata()
        index.storage_data[MetadataIndex("weight")] = next(iter(index.storage_data.values()))

    change(folder, edit)
    put(folder, "weight", call("os", "system", f"touch {marker}"))
    assert "holds no tensor weight" in refusal(folder, lambda reader: reader.read({"weight": torch.zeros(3, 4)}))
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", pickle.dumps({"weight": 1}), pickle.dumps([]), pickle.dumps(None)]
)
def test_something_else_in_place_of_an_index(folder: UPath, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    assert ".metadata" in refusal(folder)


def test_a_cut_index(folder: UPath) -> None:
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 37):
        (folder / ".metadata").write_bytes(whole[:length])
        assert ".metadata" in refusal(folder)


def test_random_bytes(folder: UPath) -> None:
    # Without "r", for which CPython makes as much room as the four bytes behind it say.
    letters = bytes(set(range(256)) - {ord("r")})
    for seed in range(200):
        (folder / ".metadata").write_bytes(bytes(random.Random(seed).choices(letters, k=500)))
        assert ".metadata" in refusal(folder)


def _entry(index: Metadata, **changes: Any) -> None:
    index.state_dict_metadata["weight"] = replace(index.state_dict_metadata["weight"], **changes)


def _chunk(index: Metadata, **changes: Any) -> None:
    _entry(index, chunks=[replace(index.state_dict_metadata["weight"].chunks[0], **changes)])


def _place(index: Metadata, **changes: Any) -> None:
    key = next(key for key in index.storage_data if key.fqn == "weight")
    index.storage_data[key] = replace(index.storage_data[key], **changes)


def _huge(index: Metadata) -> None:
    shape = torch.Size([2**60])
    key = MetadataIndex("weight", torch.Size([0]))
    index.storage_data[key] = next(iter(index.storage_data.values()))
    _entry(
        index, size=shape, chunks=[replace(index.state_dict_metadata["weight"].chunks[0], sizes=shape, offsets=(0,))]
    )
    index.state_dict_metadata["weight"].chunks[0].offsets = torch.Size([0])


def _twice(index: Metadata) -> None:
    _entry(index, size=torch.Size([6, 4]), chunks=index.state_dict_metadata["weight"].chunks * 2)


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: _place(index, relative_path="../step-1/__0_0.distcp"),
        lambda index: _place(index, relative_path="/etc/passwd"),
        lambda index: _place(index, relative_path=".."),
        lambda index: _place(index, relative_path="a\\b"),
        lambda index: _place(index, relative_path="file:///etc/passwd"),
        lambda index: _place(index, relative_path=""),
        lambda index: _place(index, relative_path=None),
        lambda index: _place(index, offset=-1),
        lambda index: _place(index, offset=1.5),
        lambda index: _place(index, length=-1),
        lambda index: _place(index, length=10),
        lambda index: _place(index, transform_descriptors=["zstd"]),
        lambda index: _entry(index, size=torch.Size([3, 5])),
        lambda index: _entry(index, size=(3, 4)),
        lambda index: _entry(index, chunks=[]),
        lambda index: _entry(index, chunks=None),
        lambda index: _entry(index, chunks=[3]),
        lambda index: _chunk(index, offsets=torch.Size([1, 0])),
        lambda index: _chunk(index, sizes=torch.Size([2, 4])),
        lambda index: _chunk(index, sizes=torch.Size([12])),
        lambda index: _entry(index, properties=replace(index.state_dict_metadata["weight"].properties, dtype="float")),
        lambda index: _entry(index, properties=3),
        _huge,
        _twice,
        lambda index: index.state_dict_metadata.update({"\x1b[2J": BytesStorageMetadata()}),
        lambda index: index.storage_data.clear(),
        lambda index: index.storage_data.update({3: 4}),
        lambda index: index.storage_data.update({MetadataIndex("weight"): 4}),
        lambda index: index.state_dict_metadata.update(weight=3),
        lambda index: index.state_dict_metadata.update({3: BytesStorageMetadata()}),
        lambda index: setattr(index, "storage_data", None),
        lambda index: setattr(index, "state_dict_metadata", [1]),
        lambda index: index.__dict__.clear(),
        lambda index: Metadata.__new__(Metadata),
    ],
)
def test_an_index_that_contradicts_itself(folder: UPath, edit: Callable[[Metadata], Any]) -> None:
    change(folder, edit)
    assert "is not the index of a checkpoint" in refusal(folder)


@pytest.mark.parametrize("offset", [1, 1 << 40])
def test_an_entry_beyond_its_file(folder: UPath, offset: int) -> None:
    size = (folder / "__0_0.distcp").stat().st_size
    change(folder, lambda index: _place(index, offset=size - 500 + offset))
    message = refusal(folder, lambda reader: reader.tensor("weight"))
    assert "__0_0.distcp" in message and "weight is said to lie beyond" in message


@pytest.mark.parametrize(
    "value",
    [
        WEIGHT.reshape(4, 3),
        torch.zeros(4, 4),
        torch.zeros(1, 4),
        WEIGHT.double(),
        WEIGHT.to_sparse(),
        torch.zeros(3, 4, device="meta"),
        {"a": 1},
        b"x" * 2000,
    ],
)
def test_an_entry_that_is_not_what_the_index_says(folder: UPath, value: Any) -> None:
    put(folder, "weight", stored(value))
    assert "weight" in refusal(folder, lambda reader: reader.tensor("weight"))
    assert "weight" in refusal(folder, lambda reader: reader.read({"weight": torch.zeros(3, 4)}))


def test_rotten_entries(folder: UPath) -> None:
    size = (folder / "__0_0.distcp").stat().st_size
    for content in (b"", bytes(size), random.Random(0).randbytes(size)):
        (folder / "__0_0.distcp").write_bytes(content)
        refusal(folder, lambda reader: reader.tensor("weight"))
        refusal(folder, lambda reader: reader.value("numbers.lr"))


def test_what_is_not_there(folder: UPath) -> None:
    assert "no tensor other" in refusal(folder, lambda reader: reader.tensor("other"))
    assert "no tensor numbers.lr" in refusal(folder, lambda reader: reader.read({"numbers.lr": torch.zeros(1)}))
    assert "no value weight" in refusal(folder, lambda reader: reader.value("weight"))
    assert "cannot be read" in refusal(folder, lambda reader: reader.read({"weight": torch.zeros(4, 4)}))
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp" in refusal(folder, lambda reader: reader.tensor("weight"))
    (folder / ".metadata").unlink()
    assert "no checkpoint" in refusal(folder)
