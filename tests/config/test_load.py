"""Bad configurations and the one line each is answered with; good ones and what they come to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import ConfigError, JobConfig, describe_error, load_config
from torchtitan.config.schema import KEYS

Write = Callable[..., list[str]]


def line_of(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    return describe_error(caught.value)


def assert_told(told: str, line: str) -> None:
    """``line`` is what should be told, or its beginning if it ends in dots."""
    assert "\n" not in told
    if line.endswith(" ..."):
        assert told.startswith(line.removesuffix(" ..."))
    else:
        assert told == line


def bad_command_lines() -> list[tuple[str, str]]:
    text = Path(__file__).with_name("bad_command_lines.txt").read_text()
    blocks = [block.splitlines() for block in text.split("\n\n")[1:] if not block.startswith("#")]
    return [(arguments, line) for arguments, line in blocks]


@pytest.mark.parametrize(("arguments", "line"), bad_command_lines())
def test_bad_command_lines(arguments: str, line: str) -> None:
    assert_told(line_of(arguments.split()), line)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('[training]\nsteps = "8"', 'training.steps="8" (job.toml): must be a whole number'),
        ("[training]\nsteps = 8.0", "training.steps=8.0 (job.toml): must be a whole number"),
        ("[training]\nsteps = true", "training.steps=true (job.toml): must be a whole number"),
        ("[training]\nstesp = 8", "training.stesp (job.toml): unknown key; did you mean training.steps?"),
        ("steps = 8", "steps (job.toml): unknown key; did you mean training.steps?"),
        ("training = 8", "training (job.toml): is a section, not a key; its keys are dataset, ..."),
        ("[zzz]", "zzz (job.toml): unknown section; there are job, ..."),
        ("[checkpoint]\nenable = 1", "checkpoint.enable=1 (job.toml): must be true or false"),
        ("[job]\nimports = 'lab'", 'job.imports="lab" (job.toml): must be a list'),
        ("[model]\nargs = 5", "model.args=5 (job.toml): must be a table"),
        ("[optimizer]\nbeta1 = '0.9'", 'optimizer.beta1="0.9" (job.toml): must be a number'),
        ("[optimizer]\nname = 5", "optimizer.name=5 (job.toml): must be text"),
        ("[optimizer.beta1]\nx = 1", "optimizer.beta1={x = 1} (job.toml): must be a number"),
        (
            "[training]\nbatch_size = 0",
            "training.local_batch_size=0 (job.toml, as training.batch_size): must be at least 1",
        ),
        (
            "[checkpoint]\ninitial_load_in_hf_quantized = true",
            "checkpoint.initial_load_in_hf_quantized=true (job.toml): loading quantized weights ...",
        ),
        (
            "[[data.sources]]\ndataset = 'text'\nweight = 0",
            "data.sources[0].weight=0 (job.toml): must be greater than 0",
        ),
        (
            "[training]\nsteps = 0\nx = 1\n[zzz]\na = 1\n[comm]\ninit_timeout_seconds = 'a'",
            "training.steps=0 (job.toml): must be at least 1 (and 3 more)",
        ),
        (f"[training]\ndtype = '{'x' * 200}'", f'training.dtype="{"x" * 79}… (job.toml): must be float32 or bfloat16'),
        ('[training]\ndtype = "a\\nb"', 'training.dtype="a\\nb" (job.toml): must be float32 or bfloat16'),
    ],
)
def test_bad_files(write: Write, content: str, line: str) -> None:
    assert_told(line_of(write(content)), line)


def test_the_command_line_can_mend_a_file(write: Write) -> None:
    assert load_config([*write("[training]\nsteps = 0"), "--training.steps", "4"]).training.steps == 4


def test_secrets_are_not_told(write: Write, lab: str) -> None:
    file = f"[job]\nimports = ['{lab}']\n[metrics]\nsinks = ['mail']\n"
    assert line_of([*write(file), "--metrics.sink_args.mail.api_key", "sesame"]) == (
        "metrics.sink_args.mail.to: is missing; metric sink 'mail' has no default for it"
    )
    assert line_of(write(file + "[metrics.sink_args.mail]\nto = 'a'\napi_key = ['sesame']\n")) == (
        'metrics.sink_args.mail.api_key=["***"] (job.toml): must be text'
    )
    assert line_of(["--job.config_file", "https://me:sesame@host/job.toml"]).startswith(
        "job.config_file=https://***@host/job.toml (command line): no such file"
    )


def test_options_of_a_registered_part_need_no_schema(write: Write, lab: str) -> None:
    file = """
        model.converters = ["lab.prune"]
        [lab.prune]
        share = 1
        [optimizer]
        betas = [0.5, 1]
        scales.b = 2.0
        """
    arguments = f"""
        --job.imports {lab} --optimizer.name Lion --optimizer.rank 4 --optimizer.nesterov --optimizer.scales.a 3
        --optimizer.momentum none --lab.prune.names a,b --metrics.sinks mail --metrics.sink_args.mail.to 5
        """
    config = load_config([*write(file), *arguments.split()])
    assert config.optimizer.model_extra == {
        "rank": 4,
        "betas": (0.5, 1.0),
        "momentum": None,
        "nesterov": True,
        "kind": "plain",
        "scales": {"a": 3, "b": 2.0},
    }
    assert config.optimizer.lr == 8e-4
    assert config.converter_args == {"lab.prune": {"share": 1.0, "names": ["a", "b"]}}
    assert config.metrics.sink_args == {"mail": {"to": "5", "api_key": ""}}
    assert config.source("optimizer.scales.b") == "job.toml"
    assert config.source("optimizer.nesterov") == "command line"
    assert config.source("optimizer.kind") == "default"


def test_options_of_a_registered_part_are_checked(lab: str) -> None:
    arguments = ["--job.imports", lab, "--optimizer.name", "Lion"]
    assert line_of(arguments) == "optimizer.rank: is missing; optimizer 'Lion' has no default for it"
    arguments += ["--optimizer.rank", "4"]
    assert line_of([*arguments, "--optimizer.beta1", "0.5"]) == (
        "optimizer.beta1=0.5 (command line): is no option of optimizer 'Lion', but of Adam, Adam8bit, "
        "AdamFp8, AdamW, AdamW8bit, AdamWFp8"
    )
    assert line_of([*arguments, "--optimizer.momentums", "0.5"]) == (
        "optimizer.momentums (command line): unknown key; did you mean optimizer.momentum?"
    )
    assert line_of([*arguments, "--optimizer.scales.a", "x"]) == (
        'optimizer.scales={a = "x"} (command line): must be a number'
    )
    assert (
        load_config([*arguments, "--optimizer.nesterov", "--optimizer.no_nesterov"]).value("optimizer.nesterov")
        is False
    )
    assert (
        load_config([*arguments, "--optimizer.no_nesterov", "--optimizer.nesterov"]).value("optimizer.nesterov") is True
    )
    assert load_config([*arguments, "--optimizer.early_step_in_backward=false"]).value("optimizer.rank") == 4


@pytest.mark.parametrize("table", ["--metrics.sink_args.mail", "--metrics.sink_args"])
def test_a_table_of_options_can_be_given_whole(lab: str, table: str) -> None:
    arguments = ["--job.imports", lab, "--metrics.sinks", "mail", table]
    entries = '{to = "me"}' if table.endswith("mail") else '{mail = {to = "me"}}'
    config = load_config([*arguments, entries])
    assert config.metrics.sink_args == {"mail": {"to": "me", "api_key": ""}}
    assert config.source("metrics.sink_args.mail.to") == "command line"
    assert line_of([*arguments, "5"]) == f"{table[2:]}=5 (command line): must be a table; write {{name = value}}"


def test_an_empty_table_is_no_harm(write: Write, lab: str) -> None:
    file = write("[lab.prune]\n[metrics.sink_args]\n[optimizer]\n[model.args]\n[compile]\n[validation.dataloader]\n")
    config = load_config([*file, "--job.imports", lab, "--model.converters", "lab.prune"])
    assert config.converter_args == {"lab.prune": {"share": 0.5, "names": []}}
    assert line_of(write("[optimizer.zzz]\n")).startswith("optimizer.zzz (job.toml): unknown key; [optimizer] takes")
    line = line_of(write("[lab.prune]\n"))
    assert line.startswith("lab.prune (job.toml): unknown section; there are job, metrics, ")
    assert line.endswith(", comm, debug, and that of each name in model.converters")


def test_an_import_that_fails_is_told(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("raise RuntimeError('two\\nlines')", "broken_parts.py")
    monkeypatch.syspath_prepend(".")
    assert line_of(["--job.imports", "broken_parts"]) == (
        "job.imports=broken_parts (command line): cannot import broken_parts: RuntimeError: two lines"
    )


def test_errors_after_loading_take_value_and_source_from_the_configuration(write: Write) -> None:
    config = load_config([*write("[training]\nseq_len = 100\n"), "--model.args.n_heads", "5"])

    def told(key: str | None) -> str:
        return describe_error(ConfigError(key, "does not fit"), config)

    assert told("training.seq_len") == "training.seq_len=100 (job.toml): does not fit"
    assert told("model.args.n_heads") == "model.args.n_heads=5 (command line): does not fit"
    assert told("model.args.dim") == "model.args.dim: does not fit"
    assert told("optimizer.beta1") == "optimizer.beta1=0.9 (default): does not fit"
    assert told("training.dataset_path") == "training.dataset_path (default): does not fit"
    assert told(None) == "does not fit"
    assert (
        describe_error(ConfigError("a.b", "does not fit"))
        == str(ConfigError("a.b", "does not fit"))
        == "a.b: does not fit"
    )


def test_defaults() -> None:
    config = load_config([])
    filled_in = ("data.args", "validation.args")
    assert {key: config.value(key) for key in KEYS if key not in filled_in} == {
        key: option.default for key, option in KEYS.items() if key not in filled_in
    }
    assert config.optimizer.model_extra == {
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "implementation": "fused",
    }


@pytest.mark.parametrize("section", [name for name, _ in JobConfig() if name != "converter_args"])
def test_nothing_can_be_changed(section: str) -> None:
    found: Any = getattr(load_config([]), section)
    name = next(iter(type(found).model_fields))
    with pytest.raises(ValueError, match="frozen"):
        setattr(found, name, getattr(found, name))


def test_a_part_named_on_the_command_line_takes_the_files_options_of_the_other_with_it(tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_text('[tokenizer]\nname = "hf"\nparse_special_tokens = true\n')
    config = load_config(["--job.config_file", str(file), "--tokenizer.name=bytes"])
    assert config.tokenizer.name == "bytes" and not config.tokenizer.model_extra
    with pytest.raises(ConfigError, match="is no option of tokenizer 'bytes'"):
        load_config(["--job.config_file", str(file), "--tokenizer.name=bytes", "--tokenizer.parse_special_tokens"])


@pytest.mark.parametrize("text", ['"training.steps" = 5', '[training]\n"dataloader.num_workers" = 2'])
def test_a_key_in_quotes_is_no_key(tmp_path: Path, text: str) -> None:
    file = tmp_path / "quoted.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="written in quotes"):
        load_config(["--job.config_file", str(file)])


def test_paths_are_read_as_a_shell_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(["--job.dump_folder=~/runs"]).job.dump_folder == f"{tmp_path}/runs"
    for bad in ("", "a" * 300, "x\0y"):
        with pytest.raises(ConfigError, match=r"job\.dump_folder"):
            load_config([f"--job.dump_folder={bad}"])


def test_lists_nested_too_deeply_are_told(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text("a = " + "[" * 5000)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(["--job.config_file", str(file)])
