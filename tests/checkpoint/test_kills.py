"""A run that is killed while it saves, and started again, ends as if nobody had killed it.

Hundreds of kills at random, in every mode, are in ``scripts/prove_checkpoints.py kills``.
"""

from pathlib import Path

from tests.checkpoint.kills import argv_of, chain, forked, in_a_save, uninterrupted

STEPS = 12


def test_kills_in_saves_change_nothing(tmp_path: Path) -> None:
    reference, run = uninterrupted(tmp_path, 2, STEPS), tmp_path / "run"
    start = forked(argv_of(tmp_path, "async", STEPS, "run"), 2, run.with_suffix(".log"))
    lived = chain(run, reference, start, [in_a_save(run, 2, 0.0), in_a_save(run, 1, 0.0), in_a_save(run, 1, 0.005)])
    assert not lived.problems
    assert lived.inside >= 1, lived
