"""Home folders, wherever a path may be written."""

from pathlib import Path

import pytest

from torchtitan.config import ConfigError, load_config
from torchtitan.config.paths import local_path, written_out

NOBODY = "~nobody9/x"


def test_home_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert (written_out("~/x"), written_out("a/~b"), written_out("./~nobody9")) == ("/home/me/x", "a/~b", "./~nobody9")
    assert local_path("./~nobody9/x", "a.b") == Path("~nobody9/x")


@pytest.mark.parametrize("key", ["training.dataset_path", "model.hf_assets_path", "data.cache_folder"])
def test_a_user_who_is_not_there(key: str) -> None:
    with pytest.raises(ConfigError, match=r"no home folder ~nobody9; .* as \./~nobody9") as error:
        load_config([f"--{key}={NOBODY}"])
    assert error.value.key == key
