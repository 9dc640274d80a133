"""One run with secrets wherever a user can put one, which then fails and tells them: nothing it left holds any."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import CHECKOUT
from tests.runs import tiny_argv

PARTS = """
import hashlib, os
from torchtitan.log import logger
from torchtitan.loss.losses import LOSSES
from torchtitan.observe.sinks import SINKS

class Mail:
    def __init__(self, told): self.told = told
    def write(self, record):
        logger.warning("sent with %s", self.told)
        if record["step"] == 3:
            raise RuntimeError(f"refused: {self.told} {os.environ['HF_TOKEN']} at https://me:sesame8@elsewhere")
    def close(self): pass

@SINKS.register("mail")
def mail(run, *, api_key: str, hf_token: str, url: str, deep: dict[str, dict[str, str]]):
    told = (api_key, hf_token, url, deep)
    run.folder.joinpath("arrived").write_text(hashlib.sha256(repr(told).encode()).hexdigest())
    return Mail(told)
"""
FILE = """
[job]
imports = ["secret_parts"]
description = "see https://me:sesame1@host/page?sig=sesame2"
print_config = true
[metrics]
sinks = ["mail"]
enable_wandb = true
enable_tensorboard = true
[metrics.sink_args.mail]
hf_token = "sesame3"
url = "https://sesame4@host/x"
deep = {credentials = {user = "sesame5"}}
"""


def test_nothing_that_a_run_writes_holds_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret_parts.py").write_text(PARTS)
    (tmp_path / "job.toml").write_text(FILE)
    argv = [*tiny_argv(tmp_path, "--checkpoint.enable", "--checkpoint.interval=1", "--training.steps=5")]
    data = tmp_path / "s3:/me:sesame6@host"  # which a local path can be, so that it is opened, logged and cached
    data.mkdir(parents=True)
    (tmp_path / "text.jsonl").rename(data / "text.jsonl")
    argv = [word for word in argv if not word.startswith("--training.dataset_path")]
    argv += ["--training.dataset_path=s3://me:sesame6@host/text.jsonl", "--metrics.sink_args.mail.api_key", "sesame7"]
    away = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = away | {
        "PYTHONPATH": f"{CHECKOUT}:{tmp_path}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "temporary"),
        "HF_TOKEN": "sesame9",
        "WANDB_MODE": "offline",
    }
    (tmp_path / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "torchtitan.launch", "--job.config_file=job.toml", *argv],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    run = tmp_path / "run"
    assert ended.returncode == 1, ended.stdout + ended.stderr
    told = ("sesame7", "sesame3", "https://sesame4@host/x", {"credentials": {"user": "sesame5"}})
    assert (run / "arrived").read_text() == hashlib.sha256(repr(told).encode()).hexdigest(), "the part got the secrets"
    for left in ("config.toml", "metrics.jsonl", "end.json", "tb", "wandb", "checkpoint/step-2/config.toml"):
        assert (run / left).exists(), left
    planted = {tmp_path / "secret_parts.py", tmp_path / "job.toml"}
    holding = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path not in planted and path.suffix != ".pyc" and b"sesame" in path.read_bytes()
    ]
    assert not holding
    for stream in (ended.stdout, ended.stderr):
        assert "sesame" not in stream, [line for line in stream.splitlines() if "sesame" in line]
    assert "RuntimeError: refused: " in ended.stderr and "sent with" in ended.stdout + ended.stderr
