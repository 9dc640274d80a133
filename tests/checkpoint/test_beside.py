"""That the measurement of what a save costs measures; the figures are ``scripts/prove_checkpoints.py beside``."""

from pathlib import Path

from tests.checkpoint.beside import TINY, cost
from tests.launch import run_ranks


def test_saves_are_timed(tmp_path: Path) -> None:
    (measured,) = run_ranks(cost, 1, tmp_path, "async", TINY)
    assert len(measured.stall) == TINY.repetitions and measured.written
    assert measured.bytes > 12 * measured.parameters  # a weight and its two moments
    assert all(seconds > 0 for seconds in (*measured.with_save, *measured.without, *measured.longest, measured.step))
    assert set(measured.figures()) == {"ratio", "stall", "longest"}
