from pathlib import Path

import pytest

from tests.data import three_sources
from tests.data.kinds import KINDS, job_on
from tests.data.orders import order_of


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "nanoset" not in kind and "megatron" not in kind])
def test_the_order_is_that_of_the_data(tmp_path: Path, kind: str) -> None:
    """The same on any number of ranks and workers, and after stops, through more than an epoch. Of token files in
    test_token_orders.py."""
    found = order_of(job_on(kind, tmp_path), steps=30, ranks=(1, 3), resumes=1)
    assert found.one, found
    assert found.rows_per_epoch < 10 * 30


def test_a_run_on_three_sources_keeps_their_shares_and_counts_their_tokens(tmp_path: Path) -> None:
    found = three_sources.train(tmp_path, "--training.steps=20")
    assert found.wrong == 0 and found.largest < 1
    assert sum(found.counts.values()) == 20 * 6 and found.counts["letters"] == 84
