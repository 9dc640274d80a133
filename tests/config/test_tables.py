"""Groups of parameters in a file and on the command line; what is wrong with them is in bad_command_lines.txt."""

from collections.abc import Callable

import pytest

from torchtitan.config import ConfigError, describe_error, load_config, to_toml
from torchtitan.config.help import explain
from torchtitan.config.reference import reference

Write = Callable[..., list[str]]

FILE = """
[optimizer]
lr = 1e-3
[[optimizer.groups]]
pattern = "tok_*"
lr = 1
[[optimizer.groups]]
lr = 2e-2
pattern = ["*.wq.weight", "*.wk.weight"]
name = "SGD"
nesterov = true
"""


def test_values_have_their_types_and_load_again_to_the_same(write: Write) -> None:
    config = load_config(write(FILE))
    first, second = config.optimizer.groups
    assert first == {"pattern": "tok_*", "lr": 1.0} and isinstance(first["lr"], float)
    assert second == {"lr": 2e-2, "pattern": ["*.wq.weight", "*.wk.weight"], "name": "SGD", "nesterov": True}
    assert load_config(write(to_toml(config))) == config
    assert config.value("optimizer.groups[1].name") == "SGD" and config.source("optimizer.groups[1].lr") == "job.toml"


def test_the_command_line_replaces_those_of_the_file(write: Write) -> None:
    config = load_config([*write(FILE), "--optimizer.groups", '[{pattern = "norm.weight", lr = 1e-3}]'])
    assert config.optimizer.groups == [{"pattern": "norm.weight", "lr": 1e-3}]
    assert load_config([*write(FILE), "--optimizer.groups=[]"]).optimizer.groups == []


def test_a_group_of_somebody_elses_optimizer(write: Write, lab: str) -> None:
    def load(group: str) -> list[dict[str, object]]:
        return load_config(["--job.imports", lab, f"--optimizer.groups=[{{pattern = 'x', {group}}}]"]).optimizer.groups

    assert load("name = 'Lion', rank = 3, scales = {a = 2}") == [
        {"pattern": "x", "name": "Lion", "rank": 3, "scales": {"a": 2.0}}
    ]
    with pytest.raises(ConfigError) as caught:
        load("name = 'Lion'")
    assert describe_error(caught.value) == (
        "optimizer.groups[0].rank (command line): is missing; optimizer 'Lion' has no default for it"
    )


def test_a_table_in_place_of_a_list_of_them(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("[optimizer.groups]\npattern = 'x'"))
    assert describe_error(caught.value) == 'optimizer.groups={pattern = "x"} (job.toml): must be a list'


def test_what_may_stand_there_is_told() -> None:
    told = explain("optimizer.groups", load_config([]))
    assert "  pattern:  names of parameters" in told and "optimizer.lr [float > 0]" in told
    assert "### `[[optimizer.groups]]`" in reference()
