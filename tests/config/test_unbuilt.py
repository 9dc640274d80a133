"""Keys that are known but not built: what asks for nothing is accepted, all else refused."""

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
