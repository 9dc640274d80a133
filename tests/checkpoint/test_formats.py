"""Steps that older versions saved go on, for every folder of ``formats/``; ``write_format.py`` writes one more."""

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.write_format import FORMATS, RANKS, SAVED, STEPS
from tests.launch import run_ranks
from tests.runs import run_job, tiny_text
from torchtitan.checkpoint.manifest import FORMAT, Manifest

STORED = sorted(path.name for path in FORMATS.iterdir())


def test_the_present_format_is_stored() -> None:
    assert str(FORMAT) in STORED, "python -m tests.checkpoint.write_format"
    for name in STORED:
        files = [path.name for path in (FORMATS / name / f"step-{SAVED}").iterdir()]
        assert json.loads((FORMATS / name / f"step-{SAVED}" / "manifest.json").read_text())["format"] == int(name)
        assert len([file for file in files if file.endswith(".distcp")]) == RANKS


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(("ranks", "close"), [(RANKS, 1e-6), (1, 1e-5)])
def test_a_stored_step_goes_on_as_the_run_would_have(tmp_path: Path, name: str, ranks: int, close: float) -> None:
    """With the configuration that was saved with it; to the bit where it was saved, within rounding elsewhere."""
    stored = FORMATS / name / f"step-{SAVED}"
    shutil.copytree(stored, tmp_path / "run" / "checkpoint" / stored.name)
    argv = [
        f"--job.config_file={stored / 'config.toml'}",
        f"--job.dump_folder={tmp_path / 'run'}",
        f"--training.dataset_path={tiny_text(tmp_path)}",
        f"--training.steps={STEPS}",
    ]
    outcome = run_ranks(run_job, ranks, argv)[0]
    assert outcome.steps == list(range(SAVED + 1, STEPS + 1))
    expected = json.loads((FORMATS / name / "expected.json").read_text())["losses"]
    assert outcome.losses == pytest.approx(expected, abs=close, rel=0)
    newest = Manifest.read(tmp_path / "run" / "checkpoint" / f"step-{STEPS}")
    assert newest.format == FORMAT, "what goes on saves as the present code does"
