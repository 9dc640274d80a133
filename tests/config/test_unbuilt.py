"""Keys that are known but not built: what asks for nothing is accepted, all else refused."""

from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import ConfigError, load_config
from torchtitan.config.aliases import ALIASES, MEANINGLESS
from torchtitan.config.options import CommandLineText
from torchtitan.config.parts import offered, with_options
from torchtitan.config.schema import KEYS
from torchtitan.config.toml import value_text
from torchtitan.config.unbuilt import ABSENT, UNBUILT


@pytest.mark.parametrize("key", UNBUILT)
def test_only_the_value_that_asks_for_nothing(key: str) -> None:
    off = UNBUILT[key].off
    if off is not ABSENT:
        UNBUILT[key].refuse_unless_off(off, key=key)
        UNBUILT[key].refuse_unless_off(CommandLineText(off if isinstance(off, str) else value_text(off)), key=key)
    others: list[Any] = [not off if isinstance(off, bool) else 12345, CommandLineText("12345"), [["x"]]]
    for other in others:
        with pytest.raises(ConfigError) as caught:
            UNBUILT[key].refuse_unless_off(other, key=key)
        assert caught.value.key == key


def test_what_asks_for_nothing_is_dropped() -> None:
    config = load_config(
        [
            "--comm.mode=default",
            "--parallelism.expert_parallel_degree=1",
            "--quantize.grouped_mm.mx.recipe_name",
            "mxfp8",
        ]
    )
    assert config == load_config([])


def test_a_number_is_not_a_truth() -> None:
    with pytest.raises(ConfigError, match="leave it at false"):
        UNBUILT["profiling.enable_profiling"].refuse_unless_off(0, key="x")
    UNBUILT["fault_tolerance.fragment_update_alpha"].refuse_unless_off(0, key="x")


def test_no_key_is_both_built_and_not() -> None:
    options = {key for choice in with_options() for key, *_ in offered(choice)}
    for table in (UNBUILT, ALIASES, MEANINGLESS):
        assert not set(table) & {*KEYS, *options}
    assert not set(UNBUILT) & (set(ALIASES) | set(MEANINGLESS))


def test_a_file_keeps_what_belongs_to_a_switch_that_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        '[profiling]\nenable_profiling = false\nprofile_freq = 100\nsave_traces_folder = "profile_trace"\n'
        "[fault_tolerance]\ngroup_size = 2\n[checkpoint]\nenable = false\nlast_save_model_only = true\n"
        '[activation_checkpoint]\nmode = "none"\nselective_ac_option = "op"\n[compile]\ncomponents = ["loss"]\n'
    )
    load_config([f"--job.config_file={file}"])
    for key, switch in {
        "profiling.profile_freq": "profiling.enable_profiling or profiling.enable_memory_snapshot",
        "profiling.save_traces_folder": "profiling.enable_profiling or profiling.enable_memory_snapshot",
        "fault_tolerance.group_size": "fault_tolerance.enable",
        "checkpoint.last_save_model_only": "checkpoint.enable = true",
        "activation_checkpoint.selective_ac_option": 'activation_checkpoint.mode = "selective"',
        "compile.components": "compile.enable = true",
    }.items():
        assert f"{key} ({file}) changes nothing without {switch}" in caplog.text
    with pytest.raises(ConfigError, match="profiling is not built yet"):
        load_config([f"--job.config_file={file}", "--profiling.enable_profiling"])
