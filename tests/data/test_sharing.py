import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from torchtitan.data.sharing import UnreadableError, make_together
from torchtitan.errors import ConfigError

# Functions that only touch files: forked, so that a process costs milliseconds.
CONTEXT = multiprocessing.get_context("fork")
COUNT = 24


def work(folder: Path, rank: int, ranks: int, seconds: float = 0.0) -> None:
    """Make and join the pieces; each line of `log` tells who made which piece."""

    def make(k: int, path: Path) -> None:
        path.write_text("half of it")
        time.sleep(seconds)
        path.write_text(f"<{k}>")
        with open(folder / "log", "a") as log:
            log.write(f"{rank} {k}\n")

    def assemble(paths: list[Path]) -> None:
        (folder / "whole.part").write_text("".join(path.read_text() for path in paths))
        (folder / "whole.part").rename(folder / "whole")

    make_together(
        folder / "work",
        COUNT,
        make=make,
        assemble=assemble,
        finished=(folder / "whole").exists,
        start=rank * COUNT // ranks,
    )


def start(folder: Path, ranks: int, seconds: float) -> list[Any]:
    all_there = CONTEXT.Barrier(ranks)  # on a busy machine one may start when others have made their share

    def begin(rank: int) -> None:
        all_there.wait(30)
        work(folder, rank, ranks, seconds)

    processes = [CONTEXT.Process(target=begin, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def join(processes: list[Any]) -> None:
    deadline = time.monotonic() + 30
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
    assert not late


def made(folder: Path) -> list[tuple[int, int]]:
    return [(int(rank), int(k)) for rank, k in map(str.split, (folder / "log").read_text().splitlines())]


def assert_whole(folder: Path) -> None:
    assert (folder / "whole").read_text() == "".join(f"<{k}>" for k in range(COUNT))
    assert not (folder / "work").exists()


def test_alone(tmp_path: Path) -> None:
    work(tmp_path, 0, 1)
    assert_whole(tmp_path)
    work(tmp_path, 0, 1)
    assert made(tmp_path) == [(0, k) for k in range(COUNT)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_makes_about_its_share_and_nothing_twice(tmp_path: Path, ranks: int) -> None:
    processes = start(tmp_path, ranks, seconds=0.06)
    join(processes)
    assert [p.exitcode for p in processes] == [0] * ranks
    assert_whole(tmp_path)
    assert sorted(k for _, k in made(tmp_path)) == list(range(COUNT))
    shares = [sum(rank == r for rank, _ in made(tmp_path)) for r in range(ranks)]
    assert min(shares) > 0.25 * COUNT / ranks, shares


def test_one_that_is_killed_is_made_up_for(tmp_path: Path) -> None:
    processes = start(tmp_path, 4, seconds=0.05)
    while not (tmp_path / "log").exists():
        time.sleep(0.005)
    time.sleep(0.02)
    os.kill(processes[2].pid, signal.SIGKILL)
    join(processes)
    assert [p.exitcode for p in processes] == [0, 0, -signal.SIGKILL, 0]
    assert_whole(tmp_path)
    pieces = [k for _, k in made(tmp_path)]
    # It may have been killed while its piece went to the disk.
    assert set(pieces) == set(range(COUNT)) and len(pieces) <= COUNT + 1


def test_killed_again_and_again_it_still_gets_there(tmp_path: Path) -> None:
    """At moments that differ: within a piece, between two, while joining them."""
    kills = 0
    while not (tmp_path / "whole").exists():
        [process] = start(tmp_path, 1, seconds=0.004)
        process.join(0.01 + 0.0037 * (kills % 11) + 0.001 * kills)  # a busy disk takes its time
        process.kill()
        process.join()
        kills += 1
        assert kills < 200
    work(tmp_path, 0, 1)
    assert kills > 1
    assert_whole(tmp_path)


def test_late_ones_find_it_done(tmp_path: Path) -> None:
    """Started all through the work and its end, when the folder of pieces goes away."""
    processes = []
    for _ in range(20):
        processes += start(tmp_path, 1, seconds=0.002)
        time.sleep(0.004)
    join(processes)
    assert [p.exitcode for p in processes] == [0] * 20
    assert_whole(tmp_path)


def test_an_error_reaches_everybody_and_leaves_no_whole(tmp_path: Path) -> None:
    def make(k: int, path: Path) -> None:
        if k == 3:
            raise ConfigError("training.dataset_path", "piece 3 is bad")
        path.touch()

    for _ in range(2):
        with pytest.raises(ConfigError, match="piece 3"):
            make_together(tmp_path / "work", 5, make=make, assemble=lambda parts: None, finished=lambda: False)


def test_pieces_are_on_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def fsync(file: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))

    monkeypatch.setattr(os, "fsync", fsync)
    work(tmp_path, 0, 1)
    assert done == [f"piece-{k:06d}.part" for k in range(COUNT)]


def test_a_piece_that_stays_unreadable_is_made_twice_and_told(tmp_path: Path) -> None:
    made: list[int] = []

    def make(k: int, path: Path) -> None:
        made.append(k)
        path.touch()

    def assemble(paths: list[Path]) -> None:
        raise UnreadableError(paths[1], "nothing in it")

    with pytest.raises(OSError, match="piece-000001 was made twice and cannot be read: nothing in it"):
        make_together(tmp_path / "work", 2, make=make, assemble=assemble, finished=lambda: False)
    assert made == [0, 1, 1]


def test_progress_counts_what_others_made(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "piece-000001").touch()
    heard: list[int] = []
    make_together(
        tmp_path / "work",
        4,
        make=lambda k, path: path.touch(),
        assemble=lambda parts: (tmp_path / "whole").touch(),
        finished=(tmp_path / "whole").exists,
        progress=heard.append,
    )
    assert heard == [2, 3, 4, 4]
