"""Secrets: known by the names of keys and by URLs, and gone from every text before anybody sees it."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan import secrets
from torchtitan.config import ConfigError, describe_error, load_config
from torchtitan.log import _Plain
from torchtitan.secrets import hidden, hide, masked, without_urls_secrets


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_hidden", set())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:sesame@host/x", "s3://***@host/x"),
        ("s3:/me:sesame@host/x", "s3:/***@host/x"),
        ("https://me:ses@me@host/x", "https://***@host/x"),
        ("https://sesame@host/x", "https://***@host/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("https://host:8080/x?page=2&access_token=sesame#top", "https://host:8080/x?page=2&access_token=***#top"),
        ("https://host/x?X-Amz-Signature=sesame&X-Amz-Date=1", "https://host/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("at https://a:sesame@b and s3://c:sesame@d.", "at https://***@b and s3://***@d."),
        ("https://host/a:b@c", "https://host/a:b@c"),
        ("me@host: 12:30", "me@host: 12:30"),
    ],
)
def test_urls(text: str, shown: str) -> None:
    assert without_urls_secrets(text) == shown
    assert without_urls_secrets(shown) == shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("credentials", {"user": "sesame", "deep": [{"x": "sesame"}]}, {"user": "***", "deep": [{"x": "***"}]}),
        ("sink.secrets.mail", "sesame", "***"),
        ("authToken", "sesame", "***"),
        ("password", 123456, "***"),
        ("max_token", 8192, 8192),
        ("password", True, True),
        ("mask_token", "<mask>", "<mask>"),
        ("bos-token", "<s>", "<s>"),
    ],
)
def test_keys(key: str, value: object, shown: object) -> None:
    assert masked(key, value) == shown


def test_what_is_hidden_is_hidden_in_any_form() -> None:
    hide("mail", {"password": 'quo"te\\', "port": 25, "url": "https://me:walnut@host"})
    hide("HF_TOKEN", "almond")
    hide("HF_TOKEN_LONGER", "almond-tree")
    hide("api_key", "abc")  # too short: it would be found in every other word
    hide("MAX_TOKEN", "8192")
    hide("USE_TOKEN", "true")
    text = 'almond-tree almond quo"te\\ quo\\"te\\\\ \'quo"te\\\\\' walnut abc 8192 true 25'
    assert hidden(text) == "*** *** *** *** '***' *** abc 8192 true 25"


def test_the_log_hides_them_in_messages_and_exceptions() -> None:
    hide("api_key", "sesame")
    try:
        raise ValueError("sesame")
    except ValueError:
        record = logging.LogRecord("titan", logging.ERROR, "f", 1, "open %s", ("sesame",), sys.exc_info())
    text = _Plain("%(message)s").format(record)
    assert "sesame" not in text and "open ***" in text and "ValueError: ***" in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--metrics.sink_args.mail", '{to = "me", api_key = "sesame"}'],
        ["--metrics.sink_args.mail", "{to = me, api_key = sesame}"],  # not even TOML
        ["--data.args", f'{{to = "{"x" * 50}", api_key = "sesame-that-would-be-cut-in-two", }}'],
        ["--optimizer.api_key=sesame", "sesame"],
        ["--training.dataset_path", "s3://me:sesame@host", "--training.steps", "s3://me:sesame@host"],
        ["--job.imports", "sesame_parts", "--metrics.sink_args.mail.api_key", "sesame"],
    ],
)  # fmt: skip
def test_error_lines(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    line = describe_error(caught.value)
    assert "***" in line and "sesame" not in line


def test_a_failure_after_loading() -> None:
    config = load_config(["--training.dataset_path", "s3://me:sesame@host/x"])
    line = describe_error(ConfigError("training.dataset_path", "no file matches s3:/me:sesame@host/x; sesame"), config)
    assert line == 'training.dataset_path="s3://***@host/x" (command line): no file matches s3:/***@host/x; ***'


UNCAUGHT = """
from torchtitan.secrets import hide, hide_in_tracebacks
hide_in_tracebacks()
hide("api_key", "sesame")
raise RuntimeError("ses" + "ame")
"""


def test_what_nobody_caught() -> None:
    ended = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.endswith("RuntimeError: ***\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.trust_remote_code"],
        ["--training.trust-remote-code=false"],
        ["--model.args", "{trust_remote_code = true}"],
        ["--metrics.sink_args.mail", "{deep = {Trust_Remote_Code = 1}}"],
        ["--data.args.trust_remote_code", "true"],
    ],
)
def test_trust_remote_code_is_refused_wherever_it_stands(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"trust_remote_code is refused.* ever run.*job\.imports"):
        load_config(argv)


def test_trust_remote_code_in_a_file(tmp_path: object) -> None:
    file = f"{tmp_path}/job.toml"
    with open(file, "w") as opened:
        opened.write("[[data.sources]]\ndataset = 'text'\nargs = {trust_remote_code = true}\n")
    with pytest.raises(ConfigError, match="trust_remote_code is refused") as caught:
        load_config(["--job.config_file", file])
    assert (caught.value.key, caught.value.source) == ("data.sources", file)


def test_a_hidden_secret_must_be_given_again(tmp_path: Path) -> None:
    for value, again in (("***", "sesame"), ("s3://***@host/x", "s3://me:sesame@host/x")):
        file = tmp_path / "config.toml"
        file.write_text(f'[training]\ndataset_path = "{value}"\n')
        with pytest.raises(ConfigError) as caught:
            load_config([f"--job.config_file={file}"])
        line = describe_error(caught.value)
        assert line.startswith(f'training.dataset_path="{value}" ({file}): was hidden when this was written')
        given = load_config([f"--job.config_file={file}", f"--training.dataset_path={again}"])
        assert given.training.dataset_path == again
