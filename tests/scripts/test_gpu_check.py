"""That the benchmark and the check of a GPU measure, and tell what; the figures are not the tests' to judge."""

import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import on_path, run
from tests.conftest import CHECKOUT


@pytest.fixture
def benchmark() -> Iterator[Any]:
    """scripts/benchmark.py, which finds its neighbours as a script does."""
    sys.path.insert(0, str(CHECKOUT / "scripts"))
    import benchmark

    yield benchmark
    sys.path.remove(str(CHECKOUT / "scripts"))


def test_the_check_of_a_gpu_runs_without_one(tmp_path: Path) -> None:
    ended = run(
        ["scripts/gpu_check.sh", str(tmp_path)],
        timeout=240,
        **on_path({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((tmp_path / "benchmark.json").read_text())
    row = told["rows"][0]
    assert row["name"] == "tiny, float32, eager"
    parts = row["products_seconds"] + row["attention_seconds"] + row["optimizer_seconds"]
    step = statistics.median(step for steps in row["measured"]["step_seconds"] for step in steps)
    assert row["limit_ratio"] == pytest.approx(step / parts) and row["limit_ratio"] > 1
    assert row["rest_seconds"] == pytest.approx(step - parts)
    assert row["tps"] == pytest.approx(2 * 64 / step)
    assert 0 < row["mfu_percent"] < 100 and 0.1 < row["peak_gib"] < 4 and row["startup_seconds"] > 1
    assert told["kernels"][0]["loader_tokens_per_second"] > 1000
    assert told["missing"] == {}

    checked = json.loads((tmp_path / "device_check.json").read_text())
    assert checked["wrong"] == 0
    same = {each["name"]: each for each in checked["same"]}
    assert same["two batches of a row for one of two"]["difference"] <= 1e-5
    assert [save["mode"] for save in checked["saves"]] == ["async"]
    shown = (tmp_path / "gpu_check.md").read_text()
    assert f"| {row['name']} | " in shown and "| two batches of a row for one of two | " in shown


def test_ratios_are_those_of_rounds(benchmark: Any) -> None:
    row = benchmark.Row("debug")
    peer = benchmark.Row("debug", peer=True)
    rounds = {
        row: benchmark.Measured([[1.0, 2.0, 9.0], [4.0]], [5.0, 7.0], [2.0, 2.0], [0.5, 0.7]),
        peer: benchmark.Measured([[3.0], [4.0]], [12.0], [4.0]),
    }
    kernels = {"products_seconds": 1.0, "attention_seconds": 0.75, "optimizer_seconds": 0.25}
    kernels |= {"flops_per_token": 1e9, "peak_flops": 2e12}
    results = {r: benchmark.figures(r, m, None if r.peer else kernels) for r, m in rounds.items()}
    found = results[row]
    assert (found["step_seconds"], found["limit_ratio"], found["rest_seconds"]) == (3.0, 1.5, 1.0)
    assert found["mfu_percent"] == pytest.approx(100 * 1e9 * (2048 / 3) / 2e12)
    assert "limit_ratio" not in results[peer]
    assert benchmark.ratios(results, rounds)[2] == "| debug, float32, eager | 1.250 | 1.000 to 1.500 | 0.500 | 0.500 |"
    assert benchmark.ratios({row: found}, rounds) == []
    lines = benchmark.table(results)
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_rows_get_the_allocator_that_they_name(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmark_runs import KEEPING, NotRun, environment, settings

    for name in ("LD_PRELOAD", *KEEPING):
        monkeypatch.delenv(name, raising=False)
    assert environment("system")["LD_PRELOAD"] == ""
    assert environment("keeping").items() >= KEEPING.items() and "LD_PRELOAD" not in environment("keeping")
    for name in ("system", "keeping"):  # the launcher leaves both as they are
        assert settings(environment(name), []) == {}
    with pytest.raises(NotRun, match="nomalloc is not installed"):
        environment("nomalloc")
    monkeypatch.setenv("LD_PRELOAD", "/opt/libtcmalloc.so.4")
    assert environment("tcmalloc")["LD_PRELOAD"] == environment("launcher")["LD_PRELOAD"] == os.environ["LD_PRELOAD"]


def test_rows_of_every_grid_are_what_the_configuration_can_say(benchmark: Any) -> None:
    from torchtitan.config import ConfigError, load_config

    for grid, rows in benchmark.GRIDS.items():
        assert len(set(map(str, rows))) == len(rows), grid
        for row in rows:
            try:
                config = load_config(row.overrides())
            except ConfigError as error:
                assert "not built yet" in str(error), row
            else:
                assert config.training.seq_len == benchmark.SHAPES[row.shape].seq_len
