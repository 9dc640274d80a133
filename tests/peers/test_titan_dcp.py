"""Checkpoints that TorchTitan 0.2.2 wrote: every tensor is read as it was, and a run goes on where it left off."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard, init_device_mesh, zeros
from upath import UPath

from tests.launch import run_ranks
from tests.runs import Outcome, row_hashes, run_jobs
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.titan import TitanStep
from torchtitan.data.batch import Batch
from torchtitan.distributed.world import World

STEPS = ["ws1", "tp2"]


@pytest.fixture(scope="module")
def peer(shared: Path) -> Path:
    return shared / "compat" / "titan022_dcp"


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("layout", STEPS)
def test_tensors_are_read_as_they_were(peer: Path, layout: str) -> None:
    expected = json.loads((peer / layout / "expected.json").read_text())["tensors"]
    reader = Reader(UPath(peer / layout / "step-5"))
    assert {name: sha256(reader.tensor(name)) for name in reader.tensors} == {
        name: tensor["sha256"] for name, tensor in expected.items()
    }
    assert sorted(reader.weights) == sorted(name for name in expected if not name.startswith("optimizer."))


def spread_tensors(world: World, folders: list[Path]) -> list[dict[str, str]]:
    """Hashes of all tensors of each step, read by ranks that hold parts of them."""
    mesh = init_device_mesh("cpu", (world.size,))
    hashes = []
    for folder in folders:
        reader = Reader(UPath(folder))
        into: dict[str, Any] = {
            name: zeros(entry.size, device_mesh=mesh, placements=[Shard(len(entry.size) - 1)])
            for name, entry in reader.tensors.items()
            if entry.size
        }
        reader.read(into)
        whole = {name: t.full_tensor() for name, t in into.items() if isinstance(t, DTensor)}
        hashes.append({name: sha256(tensor) for name, tensor in whole.items()})
    return hashes


def test_ranks_that_hold_parts_read_theirs(peer: Path) -> None:
    for layout, hashes in zip(
        STEPS, run_ranks(spread_tensors, 2, [peer / s / "step-5" for s in STEPS])[1], strict=True
    ):
        expected = json.loads((peer / layout / "expected.json").read_text())["tensors"]
        assert hashes == {name: tensor["sha256"] for name, tensor in expected.items() if tensor["shape"]}


@pytest.mark.parametrize("layout", STEPS)
def test_numbers_of_the_step(peer: Path, layout: str) -> None:
    expected = json.loads((peer / layout / "expected.json").read_text())
    step = TitanStep(Reader(UPath(peer / layout / "step-5")))
    assert (step.step, step.tokens_seen) == (5, 1280)
    group = expected["param_group_values_same_for_every_parameter"]
    names = ["tok_embeddings.weight", "layers.1.feed_forward.w2.weight", "norm.weight"]
    recorded = step.recorded(names, list(group))
    assert json.loads(json.dumps(recorded)) == dict.fromkeys(names, group)
    configured = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert step.differences(dict.fromkeys(names, configured)) == []
    step.check_optimizer(dict.fromkeys(names, "AdamW"))


def argv(peer: Path, folder: Path, layout: str, *overrides: str) -> list[str]:
    """The run of the peer's README, going on after step 5."""
    return [
        f"--job.dump_folder={folder / '-'.join([layout, *overrides]).replace('/', '_')}",
        f"--model.hf_assets_path={peer / 'tokenizer'}",
        "--model.args={dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=2048, multiple_of=16}",
        "--training.dataset=c4_test",
        f"--training.dataset_path={folder / 'data'}",
        "--data.shuffle=false",
        "--training.seq_len=64",
        "--training.global_batch_size=4",
        "--training.steps=10",
        "--training.mixed_precision_param=float32",
        "--optimizer.name=AdamW",
        "--optimizer.lr=1e-3",
        "--optimizer.beta2=0.95",
        "--optimizer.weight_decay=0.1",
        "--optimizer.implementation=for-loop",
        "--lr_scheduler.warmup_steps=2",
        "--lr_scheduler.decay_type=linear",
        "--metrics.log_freq=1",
        "--metrics.peak_tflops=1",
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={peer / layout / 'step-5'}",
        "--checkpoint.initial_load_model_only=false",
        *overrides,
    ]


def check(peer: Path, outcome: Outcome, run: str) -> None:
    """Whether a run did what the peer did in steps 6 to 10, on the same rows."""
    expected = json.loads((peer / "runs.json").read_text())["runs"][run]
    assert outcome.steps == [step["step"] for step in expected] == [6, 7, 8, 9, 10]
    assert outcome.losses == pytest.approx([step["loss"] for step in expected], abs=1e-5)
    assert outcome.norms == pytest.approx([step["grad_norm"] for step in expected], abs=1e-4)
    assert outcome.rates == pytest.approx([step["lr"] for step in expected], rel=1e-9)
    batches = load_file(peer / "batches_1_to_10.safetensors")
    rows = [
        row_hashes(Batch(inputs, labels, torch.arange(64).expand(4, -1)))
        for inputs, labels in zip(batches["inputs"][5:], batches["labels"][5:], strict=True)
    ]
    assert outcome.rows == rows
    assert outcome.tokens_seen == [256 * step for step in outcome.steps]


@pytest.fixture
def folder(peer: Path, tmp_path: Path) -> Path:
    shutil.copytree(peer / "data", tmp_path / "data")  # the cache of its tokens is written beside it
    return tmp_path


def test_a_run_goes_on_where_it_left_off(peer: Path, folder: Path) -> None:
    (outcome,) = run_ranks(run_jobs, 1, [argv(peer, folder, "ws1")])[0]
    check(peer, outcome, "ws1_resumed_from_ws1")


def test_a_run_goes_on_in_other_layouts(peer: Path, folder: Path) -> None:
    tensor_parallel = "--parallelism.tensor_parallel_degree=2"
    jobs = {
        "tp2_resumed_from_ws1": argv(peer, folder, "ws1", tensor_parallel),
        "tp2_resumed_from_tp2": argv(peer, folder, "tp2", tensor_parallel),
        "ws1_resumed_from_tp2": argv(peer, folder, "tp2"),  # two ranks, each with half of the rows
    }
    for run, outcome in zip(jobs, run_ranks(run_jobs, 2, list(jobs.values()))[0], strict=True):
        check(peer, outcome, run)
