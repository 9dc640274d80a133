import os
from pathlib import Path

import pytest

from torchtitan.data import contents
from torchtitan.data.contents import sampled_together


def test_any_change_of_small_files_is_seen(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(3)]
    for path in paths:
        path.write_bytes(bytes(200_000))
    found = {sampled_together(paths), sampled_together(paths[:2]), sampled_together([])}
    for path in paths:
        path.write_bytes(bytes(123_456) + b"#" + bytes(76_543))
        found.add(sampled_together(paths))
    assert len(found) == 6


@pytest.mark.parametrize("number", [1, 64, 65, 2047, 2048, 2049, 100_000])
def test_reads_are_bounded(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files, all of them or as many as may be."""
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(contents, "sampled_hash", lambda path, blocks: asked.append((path, blocks)) or "")
    sampled_together([Path(str(n)) for n in range(number)])
    assert sum(blocks for _, blocks in asked) <= 4096 and all(2 <= blocks <= 64 for _, blocks in asked)
    assert len(asked) == len(set(asked)) and (len(asked) == number or 1000 < len(asked) <= 2048 < number)


def test_another_file_is_told_by_what_is_read_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(1 << 20))
    before = sampled_together([path])
    path.write_bytes(os.urandom(1 << 20))
    assert sampled_together([path]) != before
