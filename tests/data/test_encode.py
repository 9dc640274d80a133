"""``python -m torchtitan.data encode``."""

import gzip
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.tokenizer_kinds import RANK_LINES, TEXT, make
from torchtitan.data.__main__ import main


def reported(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> Any:
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["encode", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text("\n".join(TEXT) + "\n")
    files[1].write_text("the\n\nfirst \u00e9t\u00e9\n<|eot_id|> qu")
    return files


def test_it_counts_what_training_would_read(
    tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("tiktoken", tmp_path / "tokenizer").file.parent  # type: ignore[union-attr]
    words = ["--tokenizer.name=tiktoken", f"--model.hf_assets_path={folder}"]
    found = reported(capsys, "encode", *texts, *words)
    assert (found["bos"], found["eos"]) == (
        {"id": 260, "token": "<|begin_of_text|>"},
        {"id": 261, "token": "<|end_of_text|>"},
    )
    second = found["files"][1]
    text = texts[1].read_text()
    assert (second["bytes"], second["characters"], second["documents"]) == (len(text.encode()), len(text), 1)
    assert second["tokens"] == len(text.encode()) - 3  # "the" is one, and so is "qu"
    assert second["bytes_per_token"] == round(second["bytes"] / second["tokens"], 4)
    assert second["tokens_per_byte"] == round(second["tokens"] / second["bytes"], 4)
    assert second["round_trip"] and second["special_tokens"] == second["unknown"] == []
    assert found["total"]["tokens"] == sum(file["tokens"] for file in found["files"])
    parsed = reported(
        capsys, "encode", *texts, *words, "--tokenizer.parse_special_tokens", "--data.eos_token=<|eot_id|>"
    )
    assert parsed["total"]["special_tokens"] == [{"id": len(RANK_LINES) + 9, "token": "<|eot_id|>", "count": 1}]
    assert parsed["eos"]["id"] == len(RANK_LINES) + 9


def test_what_is_unknown_and_where_the_text_does_not_come_back(
    tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("unigram", tmp_path / "tokenizer").file.parent  # type: ignore[union-attr]
    assert main(["encode", *map(str, texts), f"--model.hf_assets_path={folder}"]) == 0
    shown = capsys.readouterr().out
    assert "unknown tokens: 0 <unk> ×" in shown
    assert f"{texts[0]} does not come back: document 1, line 1, column 45: '\\nIt was" in shown
    assert "BOS 1 <s> and EOS 2 </s>, which is not counted here" in shown
    found = reported(capsys, "encode", texts[1], f"--model.hf_assets_path={folder}")["files"][0]
    assert found["unknown"] == [{"id": 0, "token": "<unk>", "count": found["unknown_tokens"]}]
    assert not found["round_trip"] and found["first_difference"]["line"] == 1


def test_records_and_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.jsonl").write_text('{"content": "the"}\n{"content": ""}\nnone\n{"content": "end"}\n')
    words = ["--as=jsonl", "--training.dataset=jsonl", "--data.args.text_key=content", "--data.on_bad_record=skip"]
    words += ["--tokenizer.name=bytes", "--data.bos_id=256"]
    found = reported(capsys, "encode", tmp_path / "r.jsonl", *words)
    assert (found["files"][0]["documents"], found["files"][0]["tokens"], found["files"][0]["skipped"]) == (3, 6, 1)
    assert "r.jsonl:3" in found["files"][0]["first_skipped"]
    assert "no EOS token" in found["refused"] and found["eos"] is None  # said, though the text has its tokens
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("\ufeffthé".encode())))
    given = reported(capsys, "encode", "-", "--ids", "--tokenizer.name=bytes")["files"][0]
    assert (given["ids"], given["pieces"]) == ([116, 104, 195, 169], ["t", "h", "<0xC3>", "<0xA9>"])


def test_long_text_is_counted_as_it_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, of which the second does not come back at its third line."""
    line = "a" * 99 + "\n"
    (tmp_path / "long.txt").write_text(line * 10_000 + "aa\u2060\n")
    found = reported(capsys, "encode", tmp_path / "long.txt", "--tokenizer.name=bytes")["files"][0]
    assert found["round_trip"] and found["tokens"] == 1_000_006
    decode = "torchtitan.data.tokenizers.utf8.BytesTokenizer.decode"
    monkeypatch.setattr(decode, lambda self, ids: bytes(ids).decode().replace("\u2060", ""))
    found = reported(capsys, "encode", tmp_path / "long.txt", "--tokenizer.name=bytes")["files"][0]
    assert found["first_difference"] == {
        "document": 1, "line": 10_001, "column": 3, "text": "\u2060\n", "decoded": "\n"
    }  # fmt: skip


def test_a_tokenizer_that_tells_nothing_of_its_tokens(
    texts: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what training needs, and no more; a file that is given twice is read once."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs" / "example"))
    words = ["--job.imports=acme.tokenizer", "--tokenizer.name=characters", "--tokenizer.alphabet=the "]
    found = reported(capsys, "encode", texts[1], texts[1], *words, "--ids")
    assert len(found["files"]) == 1
    assert found["files"][0]["ids"][:3] == [0, 1, 2] and found["files"][0]["pieces"][0] is None
    assert (found["bos"], found["total"]["unknown"]) == ({"id": 4, "token": None}, [])
    assert "no names for tokens; give data.eos_id" in refused(capsys, texts[1], *words, "--data.eos_token=h")


def test_a_kind_that_is_none_is_told_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.BytesIO(b"a")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=text))
    assert "--as" in refused(capsys, "-", "--as=jsnl", "--tokenizer.name=bytes") and text.tell() == 0


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"one\ntw\xe9 three\n")
    (tmp_path / "long.txt").write_text("a" * 10_001)
    assert "no file, folder or glob matches" in refused(capsys, tmp_path / "nowhere.txt")
    assert "latin1.txt:2: not UTF-8 (byte 0xe9)" in refused(capsys, tmp_path / "latin1.txt")
    assert "more than 10,000 tokens" in refused(capsys, tmp_path / "long.txt", "--ids", "--tokenizer.name=bytes")
    assert "data.eos_token" in refused(capsys, tmp_path / "long.txt", "--data.eos_token=</s>")
    assert "unknown tokenizer 'hff'; did you mean hf?" in refused(capsys, tmp_path / "long.txt", "--tokenizer.name=hff")
    assert "unknown dataset 'txt'" in refused(capsys, tmp_path / "long.txt", "--as", "txt")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\nb\xff")))
    assert refused(capsys, "-").startswith("-: -:2: not UTF-8 (byte 0xff); mend it")


def test_standard_input_is_read_as_a_file_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kind that is asked for, compressed or not, and refused as a file is."""

    def given(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))

    words = ["-", "--as=jsonl", "--tokenizer.name=bytes"]
    lines = b'{"text": "the"}\n{}\n{"text": "end"}\n'
    for content in (lines, gzip.compress(lines)):
        given(content)
        assert "-: -:2: no key 'text'" in refused(capsys, *words)
        given(content)
        found = reported(capsys, "encode", *words, "--data.on_bad_record=skip")["files"][0]
        assert (found["file"], found["documents"], found["tokens"], found["skipped"]) == ("-", 2, 6, 1)
        assert found["first_skipped"].startswith("-:2: no key")
    given(b"a\0b")
    assert refused(capsys, "-").startswith("-: - is a binary file")
    given(b"")
    assert "there is no text in -" in refused(capsys, "-")


def test_a_stream_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the"}\n')
    words = ["--as=hub", "--training.dataset=hub", "--data.args.streaming", "--tokenizer.name=bytes"]
    assert "is a stream, whose end nobody knows" in refused(
        capsys, "json", *words, f"--data.args.data_files={tmp_path}/a.jsonl"
    )


def test_one_large_id_costs_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.model").write_text("\n".join(RANK_LINES))
    (tmp_path / "a.txt").write_text("the<end>")
    words = ["--tokenizer.name=tiktoken", f"--model.hf_assets_path={tmp_path}", "--data.add_bos=false"]
    words += ["--tokenizer.special_tokens={'<end>' = 2147483647}", "--tokenizer.parse_special_tokens"]
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limit[1]))
    try:
        found = reported(capsys, "encode", tmp_path / "a.txt", *words, "--data.eos_token=<end>")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert found["total"]["special_tokens"] == [{"id": 2**31 - 1, "token": "<end>", "count": 1}]


def test_wrong_commands_and_help_need_no_torch() -> None:
    code = (
        "import sys; from torchtitan.data.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'tokenizers') if m in sys.modules])"
    )
    for words, shown in ((["encode", "--help"], "0 []"), (["encode"], "2 []"), (["encde", "a"], "2 []"), ([], "2 []")):
        ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert ended.stdout.endswith(shown + "\n"), ended
        assert "Traceback" not in ended.stderr
