"""Ids as the libraries of tokenizers gave them, and special tokens as transformers finds them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.tokenizer_speed import library
from torchtitan.data.__main__ import main
from torchtitan.data.tokenizer import TOKENIZERS, DescribedTokenizer, Tokenizer

KINDS = {
    "torchtitan_test": ("hf", {}, (2002, 2003)),
    "torchtune_hf": ("hf", {}, (None, None)),
    "torchtune_tiktoken": ("tiktoken", {"special_tokens": []}, (None, None)),
    "torchtune_sentencepiece": ("sentencepiece", {}, (1, 2)),
}


def build(shared: Path, name: str, **more: Any) -> Tokenizer:
    kind, options, _ = KINDS[name]
    return TOKENIZERS.bind(kind, options | more, key="tokenizer")(str(shared / "tokenizers" / name))


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_the_library(shared: Path, name: str) -> None:
    expected = json.loads((shared / "tokenizers" / name / "expected.json").read_text())
    tokenizer = build(shared, name)
    assert tokenizer.vocab_size == expected["vocab_size"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == KINDS[name][2]
    cases = expected["strings"].values()
    assert tokenizer.encode_batch([case["text"] for case in cases]) == [case["ids"] for case in cases]
    assert [tokenizer.decode(case["ids"]) for case in cases] == [case["decoded"] for case in cases]


def test_the_pattern_is_that_of_llama_3(shared: Path) -> None:
    expected = json.loads((shared / "tokenizers/torchtune_tiktoken/expected.json").read_text())
    assert TOKENIZERS.options("tiktoken")["pattern"].default == expected["pat_str"]


def test_special_tokens_that_only_their_settings_mark(shared: Path) -> None:
    tokenizer = build(shared, "torchtitan_test", parse_special_tokens=True)
    assert isinstance(tokenizer, DescribedTokenizer)
    assert tokenizer.special_tokens.items() >= {"<|begin_of_text|>": 2002, "<|end_of_text|>": 2003}.items()
    assert tokenizer.encode_batch(["<|begin_of_text|>a<|end_of_text|>"]) == [[2002, 97, 2003]]
    assert 2002 not in build(shared, "torchtitan_test").encode_batch(["<|begin_of_text|>a"])[0]


@pytest.mark.parametrize(
    ("settings", "older"),
    [
        ({"eos_token": "<|end_of_text|>"}, {"eos_token": {"content": "<|begin_of_text|>"}}),
        ({"bos_token": None}, {"bos_token": "<|begin_of_text|>"}),
        ({"added_tokens_decoder": {}, "eos_token": "<|end_of_text|>"}, {"bos_token": "<|begin_of_text|>"}),
        ({"bos_token": {"content": "<|begin_of_text|>", "__type": "AddedToken"}}, {}),
    ],
)
def test_bos_and_eos_are_those_of_transformers(tmp_path: Path, settings: Any, older: Any) -> None:
    from transformers import AutoTokenizer

    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    debug = TOKENIZERS.bind("hf", {}, key="tokenizer")("").file
    (tmp_path / "tokenizer.json").write_bytes(debug.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = TOKENIZERS.bind("hf", {}, key="tokenizer")(str(tmp_path))
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_tiktoken_touches_no_network(shared: Path) -> None:
    """Nor a cache of its own: every socket fails there."""
    code = (
        "import socket; socket.socket = socket.create_connection = None\n"
        "from torchtitan.data.tokenizer import TOKENIZERS\n"
        f"t = TOKENIZERS.bind('tiktoken', {{}}, key='t')({str(shared / 'tokenizers/torchtune_tiktoken')!r})\n"
        "print(t.encode_batch(['The quick']), t.vocab_size)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert shown.stdout == "[[705, 578, 709]] 2256\n"


@pytest.mark.parametrize("name", KINDS)
def test_encode_counts_what_the_library_gives_for_the_whole_text(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text of 1.1 MB, which is encoded in many parts."""
    kind, options, _ = KINDS[name]
    text = shared / "text" / "tinyshakespeare.txt"
    words = [f"--tokenizer.name={kind}", f"--model.hf_assets_path={shared / 'tokenizers' / name}"]
    words += [f"--tokenizer.{option}={value}" for option, value in options.items()]
    assert main(["encode", str(text), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["total"]
    expected = json.loads((shared / "text" / "expected.json").read_text())["tinyshakespeare.txt"]
    [ids] = library(kind, build(shared, name))([text.read_text()])
    assert (found["bytes"], found["tokens"]) == (expected["bytes"], len(ids))
    assert found["tokens_per_byte"] == round(len(ids) / expected["bytes"], 4)
    assert found["unknown_tokens"] == (ids.count(0) if kind == "sentencepiece" else 0)
    assert found["round_trip"] == (name in ("torchtune_hf", "torchtune_tiktoken"))
