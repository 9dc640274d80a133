"""The resolved configuration as TOML: it loads again to the same, and hides what is secret."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import JobConfig, load_config, to_toml
from torchtitan.config.options import CommandLineText
from torchtitan.config.schema import Job, Model
from torchtitan.config.toml import parse
from torchtitan.secrets import masked

Write = Callable[..., list[str]]

EVERYTHING = """
[job]
description = 'quotes " and \\ and ß'
max_duration_minutes = 0.1
[model]
converters = ["lab.prune"]
[model.args]
big = inf
small = -5e-324
lists = [[1, 2], ["a", {b = 1.5}], []]
"dotted.name" = {"a b" = 1, deep = {er = true}}
nothing = {}
[lab.prune]
share = 0.3333333333333333
[optimizer]
name = "Lion"
rank = 2
betas = [0.9, 0.95]
[optimizer.scales]
a = 1e-8
[metrics]
sinks = ["mail"]
[metrics.sink_args.mail]
to = "me"
[training.dataloader]
num_workers = 2
prefetch_factor = 4
"""


def test_it_loads_again_to_the_same(write: Write, lab: str) -> None:
    config = load_config([*write(EVERYTHING), "--job.imports", lab])
    text = to_toml(config)
    again = load_config(write(text, "resolved.toml"))
    assert again == config
    assert to_toml(again) == text
    assert parse(to_toml(config, sources=True)) == parse(text)
    assert config.model.args["dotted.name"]["deep"] == {"er": True}


def test_defaults_load_again_to_the_same(write: Write) -> None:
    text = to_toml(load_config([]))
    assert load_config(write(text)) == load_config([])
    assert 'name = "AdamW"' in text and "beta2 = 0.95" in text  # options of parts are said, though nobody gave them
    assert "config_file" not in text and "converter_args" not in text and "model.args" not in text


def test_presets_load_again_to_the_same(write: Write) -> None:
    presets = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
    assert presets
    for preset in presets:
        config = load_config(["--job.config_file", str(preset)])
        assert load_config(write(to_toml(config))) == config


def test_sources_stand_beside_what_is_no_default(write: Write) -> None:
    arguments = [*write("[training]\nsteps = 5\n[model.args]\nrope = {theta = 1}\n"), "--optimizer.beta1", "0.5"]
    lines = to_toml(load_config(arguments), sources=True).splitlines()
    assert "steps = 5  # job.toml" in lines
    assert "theta = 1  # job.toml" in lines
    assert "beta1 = 0.5  # command line" in lines
    assert "beta2 = 0.95" in lines


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("wandb_api_key", "sesame", "***"),
        ("metrics.sink_args.mail.password", "sesame", "***"),
        ("hf_token", "sesame", "***"),
        ("secret", CommandLineText("sesame"), "***"),
        ("access_key", ["sesame"], ["***"]),
        ("client_secret", "", ""),
        ("auth", {"token": "sesame", "user": "me"}, {"token": "***", "user": "me"}),
        ("url", "s3://me:sesame@host/x", "s3://***@host/x"),
        ("urls", ["https://host", "https://:sesame@host"], ["https://host", "https://***@host"]),
        ("url", "git@host:8080/x", "git@host:8080/x"),
        ("eos_token", "</s>", "</s>"),
        ("tokenizer", "hf", "hf"),
        ("tokens_seen", "5", "5"),
        ("keyboard", "us", "us"),
        ("token", 5, 5),
    ],
)
def test_secrets_are_masked(key: str, value: Any, shown: Any) -> None:
    assert masked(key, value) == shown
    assert type(masked(key, value)) is type(value)


def test_secrets_are_masked_wherever_they_stand() -> None:
    config = JobConfig(
        job=Job(dump_folder="s3://me:sesame@bucket/runs"), model=Model(args={"deep": {"api_key": "sesame"}})
    )
    text = to_toml(config)
    assert "sesame" not in text
    assert 'dump_folder = "s3://***@bucket/runs"' in text and 'api_key = "***"' in text
