"""A step that was saved in one layout goes on in another as if the run had never stopped.

These are some pairs; ``scripts/prove_checkpoints.py pairs`` tries each layout with each. More are in tests/golden.
"""

from pathlib import Path

from tests.checkpoint.pairs import Pair, Proof, Run, excluded
from tests.equivalence.layouts import Layout, Model

_V = {"pp": 2, "schedule": "ZBVZeroBubble"}
_SPREAD, _PIPELINE = {"dp": 2, "cp": 2}, {"pp": 2, "dp": 2}


def pairs() -> list[Pair]:
    untied = [(_SPREAD, {"tp": 2}), ({"tp": 2}, {"dp": 3}), ({"dp": 3}, _V)]
    tied = [({"dp": 3}, _PIPELINE), (_PIPELINE, {"tp": 2})]
    kernels = [Run(Layout({"dp": 2}), 101, (f"--optimizer.implementation={name}",)) for name in ("fused", "foreach")]
    large = Run(Layout({"dp": 4}), vocabulary=2049)
    return [
        *(Pair(Run(Layout(before)), Run(Layout(after))) for before, after in untied),
        *(Pair(Run(Layout(before, Model(tied=True))), Run(Layout(after, Model(tied=True)))) for before, after in tied),
        Pair(*kernels),
        Pair(large, large),
        excluded(),
    ]


def test_runs_go_on_in_other_layouts(tmp_path: Path) -> None:
    verdicts = Proof(tmp_path).verdicts(pairs())
    for verdict in verdicts:
        assert verdict.good, f"{verdict.pair.name}: {verdict}"
    assert [v.exact for v in verdicts if v.pair.before == v.pair.after] == [True]
