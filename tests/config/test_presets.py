"""Presets by name: wherever the command is typed, and never in place of a file that there is."""

from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from torchtitan.config import ConfigError, describe_error, load_config
from torchtitan.config.presets import DEFAULT, preset_file, preset_names

FILES = sorted((CHECKOUT / "train_configs").glob("*.toml"))


def test_the_package_holds_those_of_the_repository() -> None:
    assert preset_names() == [file.stem for file in FILES] and DEFAULT in preset_names()
    for file in FILES:
        found = preset_file(file.stem)
        assert found is not None and found.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", [*preset_names(), *(f"train_configs/{name}.toml" for name in preset_names())])
def test_a_name_is_as_good_as_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--job.config_file", name])
    stem = name.removeprefix("train_configs/").removesuffix(".toml")
    assert config == load_config([f"--job.config_file={CHECKOUT / 'train_configs' / stem}.toml"])
    assert config.source("model.flavor") == name
    (tmp_path / stem).mkdir()  # a folder of that name is no file
    assert load_config(["--job.config_file", name]) == config


@pytest.mark.parametrize("name", ["debug_model", "train_configs/debug_model.toml"])
def test_a_file_of_that_name_comes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("[training]\nsteps = 3\n")
    assert load_config(["--job.config_file", name]).training.steps == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3_8B", "; did you mean llama3_8b? presets: debug_model, "),
        ("train_configs/llama3_9b.toml", "; did you mean llama3_8b? presets: "),
        ("debug_model.toml", "; did you mean debug_model? presets: "),
        ("other/debug_model.toml", "; did you mean debug_model? presets: "),
        ("zzz", "no such file in {folder}, and no preset; presets: debug_model, gpt2_124m, llama3_405b, "),
        ("/train_configs/zzz.toml", ": no such file, and no preset; presets: "),
    ],
)
def test_an_unknown_name_is_told_with_those_there_are(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", name])
    line = describe_error(caught.value)
    assert line.startswith(f"job.config_file={name} (command line): no such file")
    assert hint.format(folder=tmp_path) in line
