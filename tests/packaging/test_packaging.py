"""The package as it is handed on: what is in it, and that it trains where there is no checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import torchtitan
from tests.conftest import CHECKOUT
from tests.runs import TINY, metrics

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
NOT_COPIED = shutil.ignore_patterns(
    "__pycache__", ".*_cache", ".git", "outputs", "build", "dist", "*.egg-info", "*venv*"
)


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


def build(hook: str, source: Path, target: Path) -> Path:
    """What setuptools builds from ``source``, with the setuptools of this environment: nothing is downloaded."""
    target.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(target)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return target / ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source archive of this checkout, and the wheel built from that archive."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(CHECKOUT, folder / "checkout", symlinks=True, ignore=NOT_COPIED)
    sdist = build("build_sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return Built(sdist, build("build_wheel", source, folder / "wheel"))


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    ours = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / "torchtitan").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }
    ours |= {f"torchtitan/train_configs/{path.name}" for path in (CHECKOUT / "train_configs").glob("*.toml")}
    names = zipfile.ZipFile(built.wheel).namelist()
    about = f"torchtitan-{torchtitan.__version__}.dist-info"
    assert {name for name in names if not name.startswith(f"{about}/")} == ours
    assert {f"{about}/licenses/LICENSE", f"{about}/licenses/NOTICE.md"} <= set(names)


def test_the_source_archive_holds_what_the_repository_does(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("docs", "scripts", "tests", "torchtitan", "train_configs", ".ci"):
        for path in (CHECKOUT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert path.relative_to(CHECKOUT).as_posix() in names, path
    for path in CHECKOUT.iterdir():
        if path.is_file() and path.name not in (".git", ".gitignore"):
            assert path.name in names, f"{path.name} is missing from MANIFEST.in"


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_metadata(built: Built) -> None:
    about = metadata(built.wheel)
    assert about["Name"] == "torchtitan" and about["Version"] == torchtitan.__version__
    assert built.wheel.name == f"torchtitan-{torchtitan.__version__}-py3-none-any.whl"
    assert about["License-Expression"] == "BSD-3-Clause"
    assert about.get_all("License-File") == ["LICENSE", "NOTICE.md"]
    assert about["Requires-Python"] == ">=3.10"
    classifiers = about.get_all("Classifier") or []
    assert [name for name in classifiers if name.startswith("Programming Language :: Python :: 3.")] == [
        f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)
    ]
    assert set(about.get_all("Provides-Extra") or []) == {"wandb", "s3", "docs", "test", "dev"}
    assert about.get_payload() == (CHECKOUT / "README.md").read_text()


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel and this environment's packages, but not the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # Packages found through a .pth file bring their own .pth files no further: an editable install stays behind.
    outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "outer.pth").write_text("\n".join(outer))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    trial = [str(python), "-c", "import pydantic, torchtitan"]
    missing = subprocess.run(trial, capture_output=True, text=True, cwd=folder, env=without_checkout())
    assert "No module named 'torchtitan'" in missing.stderr
    subprocess.run([*pip, str(built.wheel)], check=True, timeout=120, env=without_checkout())
    return python


def without_checkout(**more: str) -> dict[str, str]:
    away = ("PYTHONPATH", "CONFIG_FILE", "NGPU", "LOG_RANK")
    return {name: value for name, value in os.environ.items() if name not in away} | more


def test_an_installed_wheel_trains_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    tiny = [f"--model.args={TINY}", "--tokenizer.name=bytes", "--data.bos_id=256", "--data.eos_id=257"]
    text = ["--training.dataset=text", "--training.dataset_path=text.txt", "--training.seq_len=32"]
    quick = ["--training.steps=2", "--metrics.peak_tflops=1", "--metrics.no_enable_tensorboard"]
    ended = subprocess.run(
        [str(installed), "-m", "torchtitan.launch", *tiny, *text, *quick],
        cwd=tmp_path,
        env=without_checkout(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Of its own preset: nothing else keeps three steps.
    assert [line["step"] for line in metrics(tmp_path / "outputs")] == [1, 2]
    assert (tmp_path / "outputs" / "checkpoint" / "step-2" / "manifest.json").is_file()
    assert "keep_latest_k = 3" in (tmp_path / "outputs" / "config.toml").read_text()


def test_its_presets_go_by_name(installed: Path, tmp_path: Path) -> None:
    for name in ("llama3_8b", "train_configs/llama3_8b.toml"):
        ended = subprocess.run(
            [str(installed), "-m", "torchtitan.config", "print", "--job.config_file", name],
            cwd=tmp_path,
            env=without_checkout(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0 and f'flavor = "8B"  # {name}' in ended.stdout, ended.stderr


def test_the_version_is_said_once() -> None:
    version = torchtitan.__version__
    told = [CHECKOUT / "pyproject.toml", *(CHECKOUT / "torchtitan").rglob("*.py")]
    assert [path.name for path in told if f'"{version}"' in path.read_text()] == ["__init__.py"]
    assert f"## {version}" in (CHECKOUT / "CHANGELOG.md").read_text()
