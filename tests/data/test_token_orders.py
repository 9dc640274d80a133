import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.orders import order_of
from tests.data.token_files import ds, indexed

DOCUMENTS = [[(7 * d + i) % 500 for i in range(1 + 13 * d % 40)] for d in range(60)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokens")
    for k in range(3):
        ds(folder / f"{k}.ds", DOCUMENTS[20 * k : 20 * k + 20])
    return {"nanoset": folder, "megatron": indexed(folder / "m", DOCUMENTS)}


@pytest.mark.parametrize("order", ["native", "source"])
@pytest.mark.parametrize("name", ["nanoset", "megatron"])
def test_one_order_on_any_ranks_and_workers(files: dict[str, Path], name: str, order: str) -> None:
    argv = [f"--training.dataset={name}", f"--training.dataset_path={files[name]}", f"--data.order={order}"]
    sizes = ["--training.seq_len=15", "--training.steps=12", "--training.global_batch_size=10"]
    found = order_of([*argv, *sizes])
    assert found.one and found.rows_per_epoch < 120


def test_a_run_in_the_order_of_its_program(files: dict[str, Path], tmp_path: Path) -> None:
    """It logs what it reads, and ends with what is no id of its vocabulary in one line."""

    def train(vocab_size: int) -> subprocess.CompletedProcess[str]:
        words = [
            *("--job.config_file=debug_model", f"--job.dump_folder={tmp_path / str(vocab_size)}"),
            *("--training.dataset=megatron", f"--training.dataset_path={files['megatron']}", "--data.order=source"),
            *("--training.seq_len=16", "--training.steps=3", "--training.global_batch_size=4"),
            *("--model.args.n_layers=1", "--model.args.dim=32", "--model.args.n_heads=2", "--model.args.n_kv_heads=2"),
            *(f"--model.args.vocab_size={vocab_size}", "--training.dataloader.num_workers=1"),
        ]
        return subprocess.run(
            [sys.executable, "-m", "torchtitan.train", *words],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    done = train(512)
    tokens = sum(map(len, DOCUMENTS))
    assert done.returncode == 0 and f"megatron: 1 file(s) with {tokens:,} tokens in 60 sequences" in done.stderr
    ended = train(300)
    line = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert line.startswith("training.dataset_path=") and "which is no id of the model's vocabulary of 300" in line
