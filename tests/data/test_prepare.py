import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.token_files import ds, ids, indexed, opened, starts
from torchtitan.data import sharing
from torchtitan.data.__main__ import main
from torchtitan.data.commands import prepare as command
from torchtitan.data.datasets.text_files import FileSource
from torchtitan.data.tokenizers.hugging_face import build_hf_tokenizer
from torchtitan.data.tokens import prepare
from torchtitan.errors import ConfigError

BOS, EOS = 2098, 2099
TEXTS = [f"Document {n} of many.\n" + "The words go on and on. " * (n % 40) for n in range(1500)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 0.7 MB, which are three pieces."""
    path = tmp_path_factory.mktemp("text") / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def words(out: Path, corpus: Path, *more: str) -> list[str]:
    source = ["--training.dataset=jsonl", f"--training.dataset_path={corpus}"]
    return ["prepare", str(out), *source, f"--data.bos_id={BOS}", f"--data.eos_id={EOS}", *more]


def planned(out: Path, path: Path, format: Any = "ds") -> prepare.Preparation:
    out.parent.mkdir(exist_ok=True)
    source, encoding = command._source(words(out, path)[2:])
    assert isinstance(source, FileSource) and encoding is not None
    return prepare.Preparation(source, encoding, prepare.Target(out, format))


def share(plan: prepare.Preparation) -> None:
    """As a run with one worker, in this process."""
    with plan.begun():
        plan.share(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("format", ["ds", "megatron"])
def test_any_number_of_workers_writes_the_same_files(
    tmp_path: Path, corpus: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        assert main(words(tmp_path / str(workers) / "x", corpus, f"--format={format}", f"--workers={workers}")) == 0
    told = capsys.readouterr().out
    found = [contents(tmp_path / str(workers)) for workers in (1, 2)]
    assert found[0] == found[1]
    assert set(found[0]) == ({"x.ds", "x.ds.index", "x.ds.metadata"} if format == "ds" else {"x.bin", "x.idx"})
    tokens = opened("nanoset" if format == "ds" else "megatron", tmp_path / "1", vocab_size=2100)
    expected = [[BOS, *text, EOS] for text in build_hf_tokenizer("").encode_batch(TEXTS)]
    assert ids(tokens) == [i for document in expected for i in document]
    assert starts(tokens) == np.cumsum([0, *map(len, expected)])[:-1].tolist()
    assert f"{len(tokens):,} tokens of 1,500 documents, uint16" in told and "tokens/s, 2 worker(s)" in told


def test_goes_on_after_a_kill(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert main(words(tmp_path / "whole/x", corpus)) == 0
    command = words(tmp_path / "killed/x", corpus, "--workers=1")
    run = subprocess.Popen([sys.executable, "-m", "torchtitan.data", *command], stderr=subprocess.DEVNULL)
    piece, end = tmp_path / "killed/x.ds.work/piece-000000", time.monotonic() + 60
    while not piece.exists() and time.monotonic() < end:
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert piece.exists() and not (tmp_path / "killed/x.ds").exists()
    capsys.readouterr()
    assert main(command) == 0
    assert re.search(r"\([12] of 3 pieces were there\)", capsys.readouterr().out)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("renamed", ["x.ds.index", "x.ds", "x.bin", "x.idx"])
def test_goes_on_after_a_kill_between_its_last_renames(
    tmp_path: Path, renamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def rename(self: Path, to: Path, do: Any = Path.rename) -> None:
        do(self, to)
        if to.name == renamed:
            raise KilledError

    corpus, format = tmp_path / "c.jsonl", "ds" if ".ds" in renamed else "megatron"
    corpus.write_text('{"text": "a"}\n{"text": "b"}\n')
    share(planned(tmp_path / "whole/x", corpus, format))
    killed = planned(tmp_path / "killed/x", corpus, format)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Path, "rename", rename)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        share(killed)
    assert {renamed, f"x.{format}.work"} <= set(os.listdir(tmp_path / "killed"))
    share(killed)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_what_somebody_else_put_there_is_not_taken_for_left_over(tmp_path: Path, corpus: Path) -> None:
    plan = planned(tmp_path / "x", corpus)
    with plan.begun():
        pass  # killed before it had done anything
    assert (tmp_path / "x.ds.work").exists()
    (tmp_path / "x.ds").write_bytes(b"theirs")
    with pytest.raises(ConfigError, match=r"x\.ds is there already"):
        share(plan)
    (tmp_path / "x.ds").rename(tmp_path / "y.ds.index")
    with pytest.raises(ConfigError, match=r"y\.ds\.index is there already"):
        share(planned(tmp_path / "y", corpus))


def test_of_other_data_at_once_one_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no piece of it is done yet; the same data by other processes, and the other format, are no hindrance."""
    monkeypatch.setattr(sharing, "_TRIES", 2)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "other"}\n')
    plan = planned(tmp_path / "x", other)
    with plan.begun():
        assert main(words(tmp_path / "x", corpus)) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("OUT") and "x.ds.work is being made of other data" in line
        with pytest.raises(ConfigError, match="is being made of other data"):
            planned(tmp_path / "x", corpus).share(0)  # as a worker of a run that was killed, whose place this one took
        share(planned(tmp_path / "x", corpus, "megatron"))
        assert not (tmp_path / "x.ds").exists() and (tmp_path / "x.ds.work").exists()
        share(planned(tmp_path / "x", other))
    assert (tmp_path / "x.ds").exists() and not list(tmp_path.glob("*.work"))


def test_of_tokens_by_one_process_only(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [f"--training.dataset_path={indexed(tmp_path / 'tokens')}", "--training.dataset=megatron"]
    with prepare.Target(tmp_path / "x", "ds").begun({}, alone=True):
        assert main(words(tmp_path / "x", corpus, *tokens)) == 2
    assert "x.ds.work is being made by another process; wait until it is done" in capsys.readouterr().err


@pytest.mark.parametrize("full", ["x.ds.work/piece-000000.part", "x.part", "x.index-part"])
def test_a_full_disk_is_told_on_one_line(
    tmp_path: Path, corpus: Path, full: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / full).parent.mkdir(exist_ok=True)
    (tmp_path / full).symlink_to("/dev/full")
    assert main(words(tmp_path / "x", corpus, "--workers=1")) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    line = told.splitlines()[-1]
    assert line.startswith("OUT") and "No space left on device" in line and "name another folder" in line
    assert not (tmp_path / "x.ds").exists() and not (tmp_path / "x.part").exists()


def test_bad_records_are_told_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nno JSON\n{"text": "b"}\n')
    assert main(words(tmp_path / "x", bad)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "bad.jsonl:2: not JSON" in line and line.startswith("training.dataset_path")
    assert main(words(tmp_path / "x", bad, "--data.on_bad_record=skip")) == 0
    told = capsys.readouterr().out
    assert "of 2 documents" in told and "1 bad records skipped, the first: " in told and "bad.jsonl:2: not JSON" in told


def test_what_is_refused(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*more: str, out: str = "x") -> str:
        assert main(words(tmp_path / out, corpus, *more)) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        return line

    (tmp_path / "there.ds").write_bytes(b"")
    assert told(out="there.ds").endswith("there.ds is there already; remove it, or give another name")
    assert told("--workers=0").startswith("--workers: at least one")
    ds(tmp_path / "tokens.ds")
    (tmp_path / "tokens.ds.index").unlink()
    tokens = ("--training.dataset=nanoset", f"--training.dataset_path={tmp_path / 'tokens.ds'}")
    assert "no index says where documents begin" in told(*tokens)
    (tmp_path / "x.ds.work").mkdir()
    (tmp_path / "x.ds.work/recipe.json").write_text("{}")
    (tmp_path / "x.ds.work/piece-000000").write_bytes(b"")
    assert "holds pieces of other data or of another tokenizer" in told()
    tokens = ("--training.dataset=megatron", f"--training.dataset_path={indexed(tmp_path / 'tokens')}")
    assert "holds pieces of other data or of another tokenizer" in told(*tokens)
    assert (tmp_path / "x.ds.work/piece-000000").exists()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    line = told(f"--training.dataset_path={empty}", out="y")
    assert "the data set is empty: no token in 0 documents" in line
    assert not [path for path in tmp_path.glob("y.*") if path.is_file()]
    with pytest.raises(SystemExit) as error:
        main(["prepare", "--format=parquet", "x"])
    assert error.value.code == 2 and "parquet" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["ds", "megatron"])
def test_tokens_become_files_of_the_other_format(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In steps that end within documents, at their ends, and among empty ones."""
    monkeypatch.setattr(prepare, "_TOKENS_AT_ONCE", 7)
    monkeypatch.setattr(prepare, "_DOCUMENTS_AT_ONCE", 3)
    lengths = [0, 0, 0, 3, 4, 20, 0, 7, 0, 0, 0, 0, 1, 1, 14, 5, 0]
    documents = [[100 * d + i for i in range(length)] for d, length in enumerate(lengths)]
    (tmp_path / "from").mkdir()
    name, other = ("megatron", "nanoset") if format == "ds" else ("nanoset", "megatron")
    for part, own in (("0", documents[:9]), ("1", documents[9:])):
        path = tmp_path / "from" / part
        indexed(path, own) if name == "megatron" else ds(path.with_suffix(".ds"), own)
    argv = [f"--training.dataset={name}", f"--training.dataset_path={tmp_path / 'from'}", f"--format={format}"]
    assert main(["prepare", str(tmp_path / "x"), *argv]) == 0
    assert "55 tokens of 17 documents, uint16" in capsys.readouterr().out
    found = opened(other, tmp_path / "x.ds" if format == "ds" else tmp_path / "x", vocab_size=10_000)
    assert ids(found) == [i for document in documents for i in document]
    assert starts(found) == np.cumsum([0, *lengths])[:-1].tolist()
    assert not list(tmp_path.glob("*.work"))


def test_a_stream_becomes_the_files_of_its_text(tmp_path: Path, corpus: Path) -> None:
    for name in ("text", "stream"):
        (tmp_path / name).mkdir()
    assert main(words(tmp_path / "text/x", corpus)) == 0
    stream = ["--training.dataset=hub", "--training.dataset_path=json", f"--data.args.data_files=['{corpus}']"]
    options = ["--data.args.streaming=true", "--data.args.documents_at_once=100"]
    assert main(words(tmp_path / "stream/x", corpus, *stream, *options)) == 0
    assert contents(tmp_path / "stream") == contents(tmp_path / "text")


def test_a_worker_that_is_killed_is_told(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, "-m", "torchtitan.data", *words(tmp_path / "x", corpus, "--workers=1")]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end, children = time.monotonic() + 60, ""
    while not (tmp_path / "x.ds.work/piece-000000.lock").exists() and time.monotonic() < end:
        time.sleep(0.005)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    workers = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "a worker was ended by signal 9; the same command goes on with the pieces in" in errors.splitlines()[-1]
