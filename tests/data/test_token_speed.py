from pathlib import Path

import pytest

from tests.data.token_speed import cost, opened, sampling, start_late, write_documents, write_tokens


def test_rows_take_no_memory_and_little_time(tmp_path: Path) -> None:
    """A tenth of what a quiet machine does."""
    write_tokens(tmp_path / "r.ds", 64)
    best, _, memory = sampling(tmp_path / "r.ds", 2_000)
    assert best > 30e6 and memory < 20
    assert start_late(tmp_path / "r.ds") < 1


@pytest.mark.parametrize(("kind", "file"), [("nanoset", "x.ds"), ("megatron", "x")])
def test_documents_are_not_read_into_memory(tmp_path: Path, kind: str, file: str) -> None:
    write_documents(tmp_path, 2_000_000)
    found = cost(lambda: opened(kind, tmp_path / file))
    assert found.cpu_seconds < 1 and found.anonymous_mb < 100
    assert len(opened(kind, tmp_path / file).documents) == 2_000_000
