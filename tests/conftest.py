"""What every test may use: the folder of numbers made by other programs, and which skips are allowed."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.config.parts import CHOICES
from torchtitan.log import logger

# Tests run two at a time, many of them on several ranks: more threads would only wait for each other. Before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHECKOUT = Path(__file__).resolve().parents[1]
SHARED = CHECKOUT.parent / "shared"

NO_SHARED = "the folder shared/ does not lie beside the checkout"
NO_GPU = "no GPU on this machine"
NO_TOKEN_PROGRAMS = "datatrove and megatron-core are not installed"
ALLOWED_SKIPS = (NO_SHARED, NO_GPU, NO_TOKEN_PROGRAMS)


LONG = (
    *("cli/test_signals.py", "cli/test_ends.py", "equivalence/test_pipelines_combined.py"),
    *("equivalence/test_pipelines.py", "evaluate/test_layouts.py", "equivalence/test_layouts.py"),
    *("equivalence/test_passes.py", "equivalence/test_float8.py", "scripts/test_gpu_check.py"),
    *("checkpoint/test_pairs.py", "cli/test_commands.py", "golden/test_resume.py", "checkpoint/test_faults.py"),
    *(
        "docs/test_commands.py",
        "distributed/test_pipeline.py",
        "extend/test_example.py",
        "equivalence/test_families.py",
    ),
    *("checkpoint/test_checkpointer.py", "equivalence/test_muon.py", "checkpoint/test_remote.py"),
    *("equivalence/test_low_bit.py", "data/test_token_orders.py"),
)
"""Files that take long, the longest first: at the end of a run nobody shall wait for one of them."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # xdist would put the files with most tests first
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {CHECKOUT / "tests" / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Files made by other programs; tests that want them are skipped where the folder is missing."""
    if not SHARED.is_dir():
        pytest.skip(NO_SHARED)
    return SHARED


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token files of all tests go into one folder of this test run, never into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command that is run inside the tests' own process leaves the log as it was."""
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(autouse=True)
def _parts_as_before() -> Iterator[None]:
    """What ``job.imports`` registers within the tests' own process is gone after the test, and so are its modules."""
    registries = [choice.registry for choice in CHOICES]
    for registry in registries:
        registry.names()  # the built-in parts come with the first look
    tables = [registry._items for registry in registries]
    tables += [spec.flavors for items in tables for spec in items.values() if hasattr(spec, "flavors")]
    before = [dict(table) for table in tables]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("acme", "lab_parts")]:
        del sys.modules[name]
    for table, items in zip(tables, before, strict=True):
        if table != items:
            table.clear()
            table.update(items)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skip that is not on the list is a failure: a test that silently stopped running proves nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    unlisted = [r for r in skipped if not any(reason in str(r.longrepr) for reason in ALLOWED_SKIPS)]
    if unlisted:
        for report in unlisted:
            reporter.write_line(f"unlisted skip: {report.nodeid}: {report.longrepr}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
