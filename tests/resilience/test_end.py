"""end.json: the first rank that says how a run ended is the one that counts."""

import json
from pathlib import Path

from torchtitan.resilience.end import End


def test_the_first_to_write_counts(tmp_path: Path) -> None:
    assert End("failed", 1, 3, "first", 2).write(tmp_path)
    assert not End("failed", 1, 3, "second", 0).write(tmp_path)
    assert json.loads((tmp_path / "end.json").read_text()) == {
        "reason": "failed",
        "exit_code": 1,
        "step": 3,
        "error": "first",
        "rank": 2,
    }


def test_reading_and_forgetting(tmp_path: Path) -> None:
    assert End.read(tmp_path, since=0) is None
    end = End("stopped", 75, 12)
    end.write(tmp_path)
    written = (tmp_path / "end.json").stat().st_mtime
    assert End.read(tmp_path, since=written) == end
    assert End.read(tmp_path, since=written + 1) is None  # left by an earlier run
    (tmp_path / "end.json").write_text("{")
    assert End.read(tmp_path, since=0) is None
    End.forget(tmp_path)
    End.forget(tmp_path)
    assert End("done", 0).write(tmp_path)


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    assert End("failed", 1, error="told on the screen").write(tmp_path / "missing") is None
