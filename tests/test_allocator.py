"""Which allocator a run is started with, and what it says of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import tiny_argv
from torchtitan.allocator import KEEPING, describe, settings, usual_places


def library(folder: Path, name: str, header: bytes | None = None) -> Path:
    """A file that begins as one for this machine does."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(header or Path(sys.executable).read_bytes()[:64])
    return folder / name


def test_tcmalloc_is_preloaded_where_it_is_found(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("none", "narrow", "text", "full", "minimal")]
    narrow = bytearray(Path(sys.executable).read_bytes()[:64])
    narrow[4] = 1  # 32 bits
    library(tmp_path / "narrow", "libtcmalloc_minimal.so.4", bytes(narrow))
    library(tmp_path / "text", "libtcmalloc_minimal.so.4", b"INPUT(libtcmalloc.so)")
    assert settings({}, places) == KEEPING
    full = library(tmp_path / "full", "libtcmalloc.so.4")
    assert settings({"PATH": "/bin"}, places) == {"LD_PRELOAD": str(full)}
    minimal = library(tmp_path / "full", "libtcmalloc_minimal.so.4")
    assert settings({}, places) == {"LD_PRELOAD": str(minimal)}
    assert len(usual_places()) >= 4


@pytest.mark.parametrize("name", ["LD_PRELOAD", *KEEPING])
def test_what_the_user_has_chosen_stays(name: str, tmp_path: Path) -> None:
    library(tmp_path, "libtcmalloc_minimal.so.4")
    assert settings({name: ""}, [tmp_path]) == {}


def test_a_process_tells_which_it_has(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f r-xp 08:01 1 /usr/lib/libc.so.6\n7f r-xp 08:01 2 /usr/lib/libjemalloc.so.2\n7f rw-p 00:00 0\n")
    assert describe({}, maps) == "libjemalloc.so.2"
    maps.write_text("7f r-xp 08:01 1 /home/libtcmalloc/libc.so.6\n")
    assert describe(KEEPING, maps).startswith("glibc's, which is told to keep what is freed")
    assert describe({"MALLOC_TOP_PAD_": "1"}, maps).startswith("the system's")
    assert describe({}, tmp_path / "none").startswith("the system's")


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher starts torchrun on Linux only")
def test_the_launcher_gives_it_to_the_run(tmp_path: Path) -> None:
    found = next(iter(settings({}, usual_places()).values()))
    argv = tiny_argv(tmp_path, "--training.steps=1")
    bare = {name: value for name, value in os.environ.items() if name not in {"LD_PRELOAD", *KEEPING}}
    command = [sys.executable, "-m", "torchtitan.launch", *argv]
    ended = subprocess.run(command, env={**bare, "NGPU": "1"}, capture_output=True, text=True, timeout=120)
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "memory allocator: " in line]
    assert len(said) == 1, ended.stderr
    assert (Path(found).name if "/" in found else "glibc's, which is told to keep") in said[0]
