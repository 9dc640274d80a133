"""TensorBoard, read back by its own reader, and W&B: a stand-in for what it is asked, the package itself offline."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.observe.records import HOST_MEMORY, STATS, build_metrics, build_record, build_sink, build_validation_record
from torchtitan.errors import ConfigError

GPU_SCALARS = {
    "loss_metrics/global_avg_loss": 2.5,
    "loss_metrics/global_max_loss": 2.75,
    "grad_norm": 1.25,
    "throughput(tps)": 5120.0,
    "tflops": 10.24,
    "mfu(%)": 10.24,
    "time_metrics/end_to_end(s)": 0.4,
    "time_metrics/data_loading(s)": 0.05,
    "time_metrics/data_loading(%)": 12.5,
    "memory/max_active(GiB)": 32.0,
    "memory/max_active(%)": 40.0,
    "memory/max_reserved(GiB)": 40.0,
    "memory/max_reserved(%)": 50.0,
    "memory/num_alloc_retries": 1.0,
    "memory/num_ooms": 0.0,
    "n_tokens_seen": 163_840.0,
    "lr": 3e-4,
}
GPU_VALIDATION_SCALARS = {
    "loss": 2.5,
    "throughput(tps)": 5000.0,
    "memory/max_active(GiB)": 32.0,
    "memory/max_active(%)": 40.0,
    "memory/max_reserved(GiB)": 40.0,
    "memory/max_reserved(%)": 50.0,
}
GPU_ONLY = {"memory/max_active(GiB)", "memory/max_active(%)", "memory/num_alloc_retries", "memory/num_ooms"}


# TensorBoard


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def time_folder(folder: Path) -> Path:
    (found,) = folder.iterdir()
    assert re.fullmatch(r"\d{8}-\d{4}", found.name)
    return found


def test_tensorboard_has_the_scalars_that_dashboards_look_for(tmp_path: Path) -> None:
    sink = build_sink("tensorboard", tmp_path, folder="curves")
    sink.write(build_record())
    sink.close()
    scalars = read_scalars(time_folder(tmp_path / "curves"))
    assert scalars == {tag: {20: pytest.approx(value)} for tag, value in GPU_SCALARS.items()}


def validation_scalars(place: str) -> dict[str, float]:
    return {f"{place}/{tag}": value for tag, value in GPU_VALIDATION_SCALARS.items()}


def test_tensorboard_has_the_scalars_of_validation(tmp_path: Path) -> None:
    sink: Any = build_sink("tensorboard", tmp_path)
    sink.validated(build_validation_record(set=None))
    sink.validated(build_validation_record(step=30, set="wiki"))
    sink.close()
    scalars = read_scalars(time_folder(tmp_path / "tb"))
    expected = {tag: {20: pytest.approx(value)} for tag, value in validation_scalars("validation_metrics").items()}
    of_wiki = validation_scalars("validation_metrics/wiki")
    assert scalars == expected | {tag: {30: pytest.approx(value)} for tag, value in of_wiki.items()}


def test_tensorboard_leaves_out_what_does_not_apply(tmp_path: Path) -> None:
    sink = build_sink("tensorboard", tmp_path)
    sink.write(build_metrics(peak_flops=None, memory=lambda: HOST_MEMORY).write(replace(STATS, max_loss=None)))
    sink.close()
    scalars = read_scalars(time_folder(tmp_path / "tb"))
    assert scalars.keys() == GPU_SCALARS.keys() - GPU_ONLY - {"mfu(%)", "loss_metrics/global_max_loss"}
    assert scalars["memory/max_reserved(GiB)"] == {20: 1.5}


def test_tensorboard_shows_one_curve_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(now: str, resumed_step: int, steps: range, loss: float) -> None:
        monkeypatch.setattr(time, "strftime", lambda form: now)
        sink = build_sink("tensorboard", tmp_path, resumed_step)
        for step in steps:
            sink.write(build_record(step, loss=loss))
        sink.close()

    (tmp_path / "tb" / "notes").mkdir(parents=True)
    run("20200101-1100", 0, range(1, 3), 9.0)
    run("20200101-1200", 0, range(1, 7), 3.0)
    time.sleep(1.0)  # files of one folder are read in the order of the second in which they were begun
    run("20200102-0900", 4, range(5, 8), 2.0)
    run("20200103-0900", 0, range(1, 2), 8.0)
    curves = {
        folder.name: read_scalars(folder).get("loss_metrics/global_avg_loss") for folder in (tmp_path / "tb").iterdir()
    }
    assert curves == {
        "notes": None,
        "20200101-1100": {1: 9.0, 2: 9.0},
        "20200101-1200": {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0, 5: 2.0, 6: 2.0, 7: 2.0},
        "20200103-0900": {1: 8.0},
    }


# Weights & Biases

ENVIRONMENT = {
    "WANDB_TEAM": "team",
    "WANDB_PROJECT": "project",
    "WANDB_RUN_NAME": "name",
    "WANDB_RUN_ID": "id",
    "WANDB_RUN_NOTES": "notes",
    "WANDB_RUN_TAGS": "small, first",
    "WANDB_RUN_GROUP": "group",
    "WANDB_RUN_JOB_TYPE": "pretraining",
    "WANDB_RESUME_FROM": "id?_step=4",
    "WANDB_FORK_FROM": "other?_step=4",
}
STAND_IN = """
calls = []
class Error(Exception): pass
class Run:
    def log(self, scalars, step): calls.append(("log", step, scalars))
    def finish(self): calls.append(("finish",))
def init(**options):
    calls.append(("init", options))
    if options["name"] == "refused": raise Error("no API key")
    return Run()
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a stand-in for the package wandb is asked to do, in an environment without its variables."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    stand_in = importlib.import_module("wandb")
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in.calls


def test_wandb_is_described_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.toml").write_text("[training]\nsteps = 10\n")
    build_sink("wandb", tmp_path)
    assert calls == [
        (
            "init",
            {
                "dir": str(tmp_path),
                "config": {"training": {"steps": 10}},
                "entity": "team",
                "project": "project",
                "name": "name",
                "id": "id",
                "notes": "notes",
                "tags": ["small", "first"],
                "group": "group",
                "job_type": "pretraining",
                "resume_from": "id?_step=4",
                "fork_from": "other?_step=4",
            },
        )
    ]


def test_wandb_gets_the_scalars_that_apply(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    sink = build_sink("wandb", tmp_path)
    sink.write(build_record())
    sink.close()
    (_, options), *rest = calls
    assert {name for name, value in options.items() if value is not None} == {"dir", "project"}
    assert rest == [("log", 20, pytest.approx(GPU_SCALARS)), ("finish",)]


def test_wandb_gets_the_scalars_of_validation(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    sink: Any = build_sink("wandb", tmp_path)
    sink.validated(build_validation_record(set=None, memory_active_gib=None))
    sink.validated(build_validation_record(set="wiki"))
    without = validation_scalars("validation_metrics")
    del without["validation_metrics/memory/max_active(GiB)"]
    assert calls[1:] == [("log", 20, without), ("log", 20, validation_scalars("validation_metrics/wiki"))]


def test_wandb_that_does_not_start_is_an_error_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setenv("WANDB_RUN_NAME", "refused")
    with pytest.raises(ConfigError, match=r"^metrics.enable_wandb: .*no API key.*WANDB_MODE=offline"):
        build_sink("wandb", tmp_path)


OFFLINE = """
import sys
from pathlib import Path
from tests.observe.records import build_record
from torchtitan.observe.sinks import SINKS, RunFiles
sink = SINKS.get("wandb")(RunFiles(Path(sys.argv[1]), 0))
for step in (1, 2):
    sink.write(build_record(step))
sink.close()
"""


def test_wandb_itself_offline(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("the package wandb is not installed")
    (tmp_path / "config.toml").write_text("[training]\nsteps = 321\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {name: value for name, value in ENVIRONMENT.items() if "_FROM" not in name}
    subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)],
        env={**environment, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        timeout=120,
        check=True,
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/run-id.wandb")
    content = file.read_bytes()
    for word in (*GPU_SCALARS, "team", "project", "notes", "small", "first", "group", "pretraining", "321"):
        assert word.encode() in content, word
