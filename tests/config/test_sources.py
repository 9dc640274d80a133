"""Files and command line: reading them, older spellings, and which source wins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan import log
from torchtitan.config import ConfigError, load_config
from torchtitan.config.aliases import ALIASES, MEANINGLESS, older_spellings
from torchtitan.config.parts import offered, with_options
from torchtitan.config.schema import KEYS
from torchtitan.config.sources import is_known, leaves, read_file
from torchtitan.config.unbuilt import UNBUILT

Write = Callable[..., list[str]]


def test_the_command_line_beats_the_file_beats_the_default(write: Write) -> None:
    config = load_config([*write("[training]\nsteps = 5\nseq_len = 64\n"), "--training.steps", "7"])
    assert (config.training.steps, config.training.seq_len, config.training.gc_freq) == (7, 64, 50)
    assert config.source("training.steps") == "command line"
    assert config.source("training.seq_len") == "job.toml"
    assert config.source("training.gc_freq") == "default"
    assert config.job.config_file == "job.toml"


def test_the_last_of_a_repeated_key_counts(write: Write) -> None:
    assert load_config(["--training.steps", "5", "--training.steps=6"]).training.steps == 6
    arguments = [*write("[training]\nsteps = 5\n"), *write("[training]\nsteps = 9\n", "other.toml")]
    assert load_config(arguments).training.steps == 9


def test_tables_are_laid_over_entry_by_entry(write: Write) -> None:
    file = write('[model.args]\nn_layers = 2\n"a.b" = 1\nrope_scaling_args = {scaling_factor = 8, low = 1}\n')
    config = load_config(
        [*file, "--model.args.dim", "64", "--model.args.rope_scaling_args.low=2", "--model.args.tie_word_embeddings"]
    )
    assert config.model.args == {
        "n_layers": 2,
        "a.b": 1,
        "rope_scaling_args": {"scaling_factor": 8, "low": 2},
        "dim": 64,
        "tie_word_embeddings": True,
    }
    assert config.source("model.args.dim") == "command line"
    assert config.source("model.args.rope_scaling_args.scaling_factor") == "job.toml"
    assert config.source("model.args") == "job.toml and command line"
    assert load_config([*file, "--model.args", "{n_layers = 3}"]).model.args["n_layers"] == 3
    assert load_config([*file, "--model.args.rope_scaling_args=none"]).model.args["rope_scaling_args"] == "none"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--checkpoint.no_enable"], "checkpoint.enable", False),
        (["--data.no-shuffle"], "data.shuffle", False),
        (["--data.shuffle", "off"], "data.shuffle", False),
        (["--training.local-batch-size=4"], "training.local_batch_size", 4),
        (["--training.dataloader.num-workers", "2"], "training.dataloader.num_workers", 2),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.dataset_path", "none"], "training.dataset_path", None),
        (["--optimizer.weight_decay_exclude", "*norm*, *b"], "optimizer.weight_decay_exclude", ["*norm*", "*b"]),
        (["--optimizer.beta2", "0.9"], "optimizer.beta2", 0.9),
        (["--lr_scheduler.decay_ratio", "none"], "lr_scheduler.decay_ratio", None),
        (["--tokenizer.no_parse_special_tokens"], "tokenizer.parse_special_tokens", False),
        (["--model.args.norm_eps", "1e-6"], "model.args.norm_eps", 1e-6),
    ],
)  # fmt: skip
def test_the_command_line(arguments: list[str], key: str, value: Any) -> None:
    config = load_config(arguments)
    assert config.value(key) == value
    assert config.source(key) == "command line"


OLD = """
[job]
description = "the layout of December 2024"
use_for_integration_test = true
[metrics]
enable_color_printing = false
enable_wandb = false
[model]
norm_type = "rmsnorm"
tokenizer_path = "tokenizer.json"
[training]
batch_size = 4
warmup_steps = 2
seed = 7
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = false
lr = 1e-3
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 1
enable_async_tensor_parallel = false
custom_import = "json"
[checkpoint]
enable_checkpoint = true
interval_type = "steps"
model_weights_only = false
[float8]
enable_float8_linear = false
[profiling]
"""


def test_older_spellings_of_a_file(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_noted", set())
    monkeypatch.setattr(log.logger, "propagate", True)
    config = load_config(write(OLD))
    assert config.metrics.disable_color_printing is True
    assert config.model.hf_assets_path == "tokenizer.json"
    assert (config.training.local_batch_size, config.optimizer.lr, config.debug.seed) == (4, 1e-3, 7)
    assert config.value("lr_scheduler.warmup_steps") == 2
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.job.imports == ["json"]
    assert config.checkpoint.enable is True
    assert config.source("training.local_batch_size") == "job.toml"
    assert "training.batch_size (job.toml) is now called training.local_batch_size" in caplog.messages
    told = [message for message in caplog.messages if "use_for_integration_test" in message]
    assert told == [
        "job.use_for_integration_test (job.toml) changes nothing: " + MEANINGLESS["job.use_for_integration_test"]
    ]


@pytest.mark.parametrize("old", [old for old, alias in ALIASES.items() if alias.convert is None])
def test_every_older_spelling_leads_to_a_key(old: str) -> None:
    options = {key for choice in with_options() for key, *_ in offered(choice)}
    assert ALIASES[old].key in {*KEYS, *UNBUILT, *options}
    assert old not in KEYS
    assert old in older_spellings(ALIASES[old].key)


def test_a_bare_older_spelling_can_be_negated() -> None:
    assert load_config(["--training.no_deterministic"]).debug.deterministic is False
    assert load_config(["--training.deterministic"]).debug.deterministic is True


@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.lr", "1e-4", "--optimizer.lr", "2e-4"],
        ["--optimizer.lr", "1e-4", "--training.lr", "1e-4"],
    ],
)
def test_two_spellings_in_one_source(arguments: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"older spelling of optimizer.lr, which is given as optimizer.lr too"
    ) as caught:
        load_config(arguments)
    assert caught.value.key == "training.lr"


def test_two_older_spellings_in_one_source(write: Write) -> None:
    file = write("[checkpoint]\nmodel_weights_only = false\nlast_save_model_weights_only = false\n")
    with pytest.raises(ConfigError, match=r"older spelling of checkpoint.last_save_model_only"):
        load_config(file)


def test_two_spellings_in_two_sources(write: Write) -> None:
    config = load_config([*write("[training]\nlr = 1e-4\n"), "--optimizer.lr", "2e-4"])
    assert config.optimizer.lr == 2e-4
    config = load_config([*write("[optimizer]\nlr = 1e-4\n"), "--training.lr", "2e-4"])
    assert config.optimizer.lr == 2e-4


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[training]\nsteps = \n", "is not TOML: Invalid value (at line 2, column 9)"),
        (b"[training]\nsteps = 1\nsteps = 2\n", "is not TOML: Cannot overwrite a value (at line 3, column 10)"),
        (b"[job]\n# caf\xe9\n", "is not UTF-8 text: byte 0xe9 in line 2"),
        (b"[job]\nconfig_file = 'x.toml'\n", "a file cannot name another; name it on the command line"),
    ],
)
def test_broken_files(write: Write, content: bytes, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(content))
    assert (caught.value.key, caught.value.problem) == ("job.config_file", problem)


def test_a_byte_order_mark_is_no_harm(write: Write) -> None:
    assert load_config(write(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")).training.steps == 3


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("jub.toml", "; did you mean job.toml?"),
        ("nowhere/job.toml", "no such file in "),
        (".", "cannot be read: Is a directory"),
        ("job.yaml", "reading Nanotron's YAML is not built yet"),
        ("job.sh", "reading Megatron's arguments is not built yet"),
        ("job.ARGS", "reading Megatron's arguments is not built yet"),
    ],
)
def test_files_that_cannot_be_read(write: Write, name: str, problem: str) -> None:
    write("")
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", name])
    assert problem in caught.value.problem
    assert (caught.value.value, caught.value.source) == (name, "command line")


def test_keys_of_files_that_people_have(shared: Path) -> None:
    files = [*shared.glob("compat/configs/titan_*.toml"), shared / "compat/titan022_dcp/train.toml"]
    options = {key for choice in with_options() for key, *_ in offered(choice)}
    assert len(files) > 5
    for file in files:
        keys = {".".join(path) for path, _ in leaves(read_file(str(file)))}
        assert not {key for key in keys - options if not is_known(key)}, file
