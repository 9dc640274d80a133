"""The package of docs/extend.md: installed into a new environment, it trains with all of its parts in two layouts."""

import contextlib
import json
import os
import shutil
import site
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.launch import run_command, run_main, started_main
from torchtitan.config.__main__ import main as config_main
from torchtitan.train import main as train_main

EXAMPLE = CHECKOUT / "docs" / "example"
PARTS = ("acme_parallel", "sums", "characters", "Lion", "inverse_sqrt", "soft_cap", "poly", "csv", "sharpness_aware")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment, which sees the packages of this one and has the example's installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    found = folder / "venv" / "bin" / "python"
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (packages / "beside.pth").write_text("\n".join([*site.getsitepackages(), str(CHECKOUT)]))
    shutil.copytree(EXAMPLE, folder / "example")  # a build leaves files behind
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", str(folder / "example")]
    subprocess.run([found, *install], check=True, timeout=120, env=environment())
    return found


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def run(python: Path, *arguments: str, folder: Path, **more: str) -> str:
    done = run_command([str(python), *arguments], timeout=200, cwd=folder, env=environment(**more))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def packages_of(python: Path) -> Path:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return packages


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def test_it_trains_with_everything_in_two_layouts(python: Path, tmp_path: Path) -> None:
    """By the launcher on one rank; as torchrun would start them on four, with the installed package."""
    argv = [f"--job.config_file={EXAMPLE / 'acme.toml'}", "--training.steps=4"]
    run(python, "-m", "torchtitan.launch", *argv, f"--job.dump_folder={tmp_path / '1'}", folder=tmp_path, NGPU="1")
    argv += ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
    argv += [f"--job.dump_folder={tmp_path / '4'}"]
    world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in map(str, range(4)):
            (folder := tmp_path / f"rank {rank}").mkdir()
            place = {"RANK": rank, "LOCAL_RANK": rank, **world}
            started = started_main(train_main, argv, folder=folder, path=packages_of(python), **place)
            ranks.append(stack.enter_context(started))
        for rank, process in enumerate(ranks):
            process.join(200)
            assert process.exitcode == 0, (tmp_path / f"rank {rank}" / "printed").read_text()
    losses = {}
    for layout in ("1", "4"):
        lines = (tmp_path / layout / "metrics.jsonl").read_text().splitlines()
        losses[layout] = [json.loads(line)["loss"] for line in lines]
        table = (tmp_path / layout / "metrics.csv").read_text().splitlines()
        assert table[0] == "step,loss,grad_norm,lr" and len(table) == 5
        assert (tmp_path / layout / "checkpoint" / "step-4").is_dir()
    assert len(losses["1"]) == 4 and losses["1"][-1] < losses["1"][0]
    assert losses["4"] == pytest.approx(losses["1"], abs=1e-5)


def test_its_options_are_explained_checked_and_offered(python: Path, tmp_path: Path) -> None:
    packages = packages_of(python)
    file = f"--job.config_file={EXAMPLE / 'acme.toml'}"
    code, told = run_main(config_main, ["explain", "optimizer", file], folder=tmp_path, path=packages)
    assert code == 0, told
    assert "optimizer.beta2" in told and "decay of the momentum" in told and "0.98" in told
    flavor = ["check", "--job.imports=acme", "--model.flavor=acme-tiny"]
    code, told = run_main(config_main, flavor, folder=tmp_path, path=packages)
    assert code == 0 and "llama3 acme-tiny" in told, told
    wrong = subprocess.run(
        [python, "-m", "torchtitan.config", "check", file, "--optimizer.beta2=2"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert wrong.returncode == 2 and wrong.stderr.startswith("optimizer.beta2=2 (command line): must be less than 1")


def test_the_page_shows_every_file_and_the_configuration_names_every_part() -> None:
    page, config = (CHECKOUT / "docs" / "extend.md").read_text(), (EXAMPLE / "acme.toml").read_text()
    files = [file for suffix in ("py", "toml") for file in EXAMPLE.rglob(f"*.{suffix}")]
    assert len(files) == 13
    for file in files:
        assert f'--8<-- "{file.relative_to(CHECKOUT)}"' in page, file
    assert all(f'"{part}"' in config for part in PARTS)


def test_the_interpreter_of_the_tests_has_not_got_the_package() -> None:
    assert subprocess.run([sys.executable, "-c", "import acme"], capture_output=True, env=environment()).returncode == 1
