"""Every shipped preset loads, passes its checks, and names a model that builds."""

from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from torchtitan.config import load_config, to_toml
from torchtitan.resolve.job import resolve_job

PRESETS = sorted((CHECKOUT / "train_configs").glob("*.toml"))


def test_there_are_presets() -> None:
    assert {p.stem for p in PRESETS} >= {"debug_model", "llama3_8b", "llama3_70b", "llama3_405b"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_a_preset_loads_builds_and_passes_its_checks(preset: Path, tmp_path: Path) -> None:
    argv = [f"--job.config_file={preset}", f"--job.dump_folder={tmp_path}"]
    config = load_config(argv)
    ranks = 1 if preset.stem == "debug_model" else 64
    job = resolve_job(config, ranks)
    degrees = job.spread.degrees
    assert degrees.readers * degrees.copies == ranks
    assert all(p.is_meta for p in job.spec.build_meta(job.args).parameters())
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(config))
    again = load_config([f"--job.config_file={resolved}"])
    assert to_toml(again) == to_toml(config)
