"""What the files of the short form share: the configuration, and the numbers of one process."""

from pathlib import Path

import pytest

from tests.equivalence.layouts import Layout, Model, Record, base_argv, run_all
from tests.launch import run_ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two steps: the numbers of the second are those of updated weights. scripts/prove_layouts.py makes three."""
    folder: Path = tmp_path_factory.mktemp("equivalence")
    return base_argv(folder, steps=2)


@pytest.fixture(scope="module")
def references(base: list[str], request: pytest.FixtureRequest) -> dict[Model, Record]:
    """Each model of the file's launches in one process, its whole batch at once."""
    models = list(dict.fromkeys(layout.model for layouts in request.module.LAUNCHES for layout in layouts))
    (records,) = run_ranks(run_all, 1, base, [Layout({}, model) for model in models], timeout=280)
    return dict(zip(models, records, strict=True))
