"""Checkpoints in a bucket: a server of S3's protocol on this machine, reached as any user would reach it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.launch import RanksFailed, run_ranks
from tests.runs import Outcome, run_jobs, tiny_argv
from torchtitan.checkpoint.__main__ import main
from torchtitan.checkpoint.places import place
from torchtitan.checkpoint.storage import StepsInBucket, step_folders
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError

SAVES = ["--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=20"]


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment by which a bucket named ``runs`` is reached."""
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="runs")
        yield environment
    moto.stop()


def run_there(world: World, environment: Mapping[str, str], argvs: list[list[str]]) -> list[Outcome]:
    os.environ.update(environment)
    return run_jobs(world, argvs)


def names(url: str) -> set[str]:
    return {entry.name for entry in place(url, key="test").iterdir()}


def test_a_run_saves_there_goes_on_from_there_and_keeps_the_newest(
    server: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def there(name: str, *overrides: str) -> list[str]:
        return tiny_argv(tmp_path, *SAVES, f"--checkpoint.folder=s3://runs/{name}", *overrides, run=name)

    keep = ["--checkpoint.keep_latest_k=2", "--checkpoint.async_mode=async"]
    through, half, more, weights = run_ranks(
        run_there,
        2,
        server,
        [
            tiny_argv(tmp_path, "--training.steps=8", "--lr_scheduler.total_steps=20", run="through"),
            there("a", *keep, "--training.steps=5"),
            there("a", *keep, "--training.steps=8", "--checkpoint.last_save_model_only"),
            there("b", "--checkpoint.initial_load_path=s3://runs/a", "--training.steps=1"),
        ],
        timeout=240,
    )[0]
    assert half.losses == through.losses[:5]
    assert more.losses == through.losses
    assert weights.losses[0] < through.losses[0]
    assert names("s3://runs/a") == {"step-6", "step-8", "step-8-export"}
    assert not (tmp_path / "a" / "checkpoint").exists()

    folders = step_folders(place("s3://runs/a", key="test"))
    assert isinstance(folders, StepsInBucket) and folders.steps() == [6, 8]

    assert main(["verify", "s3://runs/a"]) == 0
    data = folders.path(8) / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert main(["verify", "s3://runs/a"]) == 1
    assert "step-8/__1_0.distcp" in capsys.readouterr().out
    (again,) = run_ranks(run_there, 1, server, [there("a", *keep, "--training.steps=8")])[0]
    assert again.losses == pytest.approx(through.losses, abs=1e-5)  # from step 6, on one rank
    with pytest.raises(RanksFailed, match=r"__1_0\.distcp was changed"):
        data = folders.path(6) / "__1_0.distcp"
        data.write_bytes(b"x" * data.stat().st_size)
        run_ranks(run_there, 1, server, [there("a", "--checkpoint.load_step=6")])


def test_only_a_manifest_makes_a_step(server: Mapping[str, str]) -> None:
    folders = step_folders(place("s3://runs/c", key="test"))
    for step in (2, 4, 6):
        folders.prepare(folders.path(step))
        (folders.partial(folders.path(step)) / "data").write_text("weights")
        if step != 6:  # killed while it wrote
            (folders.path(step) / "manifest.json").write_text("{}")
            folders.commit(folders.path(step))
    assert folders.steps() == [2, 4] and folders.incomplete() == [6]
    foreign = folders.path(8)
    (foreign / ".metadata").write_text("another program's")
    assert folders.foreign() == [8]
    assert folders.set_aside_after(2) == [4]
    folders.sweep()
    assert names("s3://runs/c") == {"step-2", "step-8", "step-4.superseded"}
    folders.prepare(foreign)
    assert (folders.root / "step-8.superseded" / ".metadata").read_text() == "another program's"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://me:secret@runs/x", "environment"),
        ("nonsense://runs/x", "no file system is known"),
        ("gs://runs/x", "package that is not installed"),
        ("s3://nowhere/x", "cannot be written to"),
        ("s3:///x", "no such place there"),
        ("s3:/runs/x", "lost a slash"),
        ("://x", "names no file system"),
        ("file://runs/x", "file:///runs/x"),
    ],
)
def test_what_cannot_be_reached_is_refused_in_one_line(server: Mapping[str, str], url: str, message: str) -> None:
    from torchtitan.checkpoint.places import check_remote

    with pytest.raises(ConfigError, match=message) as caught:
        check_remote(place(url, key="checkpoint.folder"), "checkpoint.folder")
    assert caught.value.key == "checkpoint.folder" and "secret" not in str(caught.value)
