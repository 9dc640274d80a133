import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.launch import run_ranks
from tests.runs import run_job, tiny_argv
from torchtitan.data.__main__ import main
from torchtitan.data.batch import IGNORE_INDEX


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return tiny_argv(tmp_path, "--training.steps=3")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


def test_the_rows_are_those_that_a_run_trains_on(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_ranks(run_job, 1, argv)[0]
    rows = json.loads(shown(capsys, "--step", "3", "--json", *argv))
    hashes = [
        hashlib.sha256(b"".join(np.array(row[part]).tobytes() for part in ("tokens", "labels", "positions")))
        for row in rows
    ]
    assert [found.hexdigest()[:16] for found in hashes] == outcome.rows[2]
    assert [row["row"] for row in rows] == list(range(12, 18)) and "times" in rows[0]["text"]


def test_documents_are_seen(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--step=1", "--rows=2", "--tokens", *argv, "--data.packing=documents")
    head, *lines = out.splitlines()
    assert "row 0: row 0 of text, 48 tokens" in head and len(lines) == 2 * 48 + 1
    ids, positions, labels = zip(*(map(int, line.split(maxsplit=3)[:3]) for line in lines[:48]), strict=True)
    starts = [n for n, position in enumerate(positions) if position == 0]
    assert len(starts) > 1 and f"positions begin {len(starts)} times" in head
    assert all(ids[n] == 256 and labels[n - 1] == IGNORE_INDEX for n in starts[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "0"], "--step: 0 must be at least 1"),
        (["--step", "1", "--rows", "0"], "--rows: 0 must be at least 1"),
        (["--step", "1", "--training.seq_len", "0"], "training.seq_len=0 (command line): must be at least 1"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *words]) == 2
    assert capsys.readouterr().err.strip() == message
