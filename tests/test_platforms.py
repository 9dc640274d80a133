"""What is said on systems other than Linux. The words are tested here; nothing is run there."""

import subprocess
import sys

import pytest

from torchtitan import launch, train
from torchtitan.config import __main__ as config_command
from torchtitan.errors import ConfigError
from torchtitan.platforms import check_platform, check_processes

WSL = "Windows is not supported; use WSL 2 (wsl --install), which is Linux"


@pytest.mark.parametrize("platform", ["win32", "cygwin"])
def test_windows_is_refused_in_a_line(
    platform: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(ConfigError, match="WSL"):
        check_platform()
    for main, argv in ((train.main, []), (config_command.main, ["check"])):
        assert main(argv) == 2
        assert capfd.readouterr().err == f"{WSL}\n"


IMPORTED_ON_WINDOWS = """
import sys
sys.modules["fcntl"] = None
from torchtitan import launch, train
sys.platform = "win32"
sys.exit(train.main([]) + launch.main([]))
"""


def test_the_commands_get_as_far_as_saying_so() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTED_ON_WINDOWS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (4, f"{WSL}\n" * 2)


def test_macos_runs_one_process_without_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained: list[list[str]] = []
    monkeypatch.setattr(launch, "train_main", lambda argv: trained.append(list(argv)) or 0)
    monkeypatch.setattr(launch.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(launch, "init_logger", lambda: None)
    monkeypatch.setattr(launch.logger, "setLevel", lambda level: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    check_platform()
    check_processes(1)
    monkeypatch.delenv("NGPU", raising=False)
    assert launch.main(["--training.steps=3"]) == 0
    assert trained == [["--job.config_file", "debug_model", "--training.steps=3"]]
    monkeypatch.setenv("NGPU", "2")
    assert launch.main([]) == 2
    error = capfd.readouterr().err.strip()
    assert error == "2 processes need Linux; on darwin one can be run, without torchrun (NGPU=1)"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes need Linux"):
        train.train(config_command.load_config([]))
