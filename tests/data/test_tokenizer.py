import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from torchtitan.data.tokenizer import TOKENIZERS, Tokenizer, required_vocab_size, resolve_special_ids
from torchtitan.errors import ConfigError

DEBUG = Path(__file__).resolve().parents[2] / "torchtitan" / "assets" / "debug_tokenizer"
NASTY = [
    "",
    " ",
    "\n\n \t\r\n  x\n",
    "plain English, it's 42 o'clock",
    "Zürich déjà vu — “quoted” …",
    "机器学习 日本語のテキスト 한국어 문장",
    "👨‍👩‍👧‍👦 🇨🇭 \u200b\u202e\ufeff",
    "def f(x):\n\treturn x  # \x00\x01\x7f",
    "e\u0301 vs é, ﬁ, Ａ",
    "<|begin_of_text|> inside <|end_of_text|>",
    "".join(map(chr, range(1, 0xD800, 97))) + "".join(map(chr, range(0xE000, 0x20000, 331))),
]


def build(name: str, path: str | Path = "", **options: Any) -> Tokenizer:
    return TOKENIZERS.bind(name, options, key="tokenizer")(str(path))


def save(folder: Path, content: dict[str, Any], settings: Any = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def debug_json() -> dict[str, Any]:
    return json.loads((DEBUG / "tokenizer.json").read_text())


class TestDebugTokenizer:
    def test_vocabulary_is_that_of_the_debug_model(self) -> None:
        tokenizer = build("hf")
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 2046, 2047)
        assert tokenizer.decode([2046, 2047]) == "<|begin_of_text|><|end_of_text|>"

    @pytest.mark.parametrize("text", NASTY)
    def test_gives_any_text_back(self, text: str) -> None:
        tokenizer = build("hf")
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert not {2046, 2047} & set(ids)

    def test_is_the_one_whose_origin_is_told(self) -> None:
        digest = hashlib.sha256((DEBUG / "tokenizer.json").read_bytes()).hexdigest()
        assert digest in (DEBUG / "README.md").read_text()


def test_special_tokens_in_text_are_text_unless_asked_for() -> None:
    text = ["a<|end_of_text|>b"]
    plain, parsed = build("hf"), build("hf", parse_special_tokens=True)
    assert 2047 not in plain.encode_batch(text)[0]
    assert parsed.encode_batch(text)[0].count(2047) == 1
    assert plain.fingerprint != parsed.fingerprint


def test_what_the_file_would_add_or_cut_is_not_done(tmp_path: Path, debug_json: dict[str, Any]) -> None:
    """Left in a file by whoever saved it: a template with BOS, truncation and padding."""
    rust = tokenizers.Tokenizer.from_str(json.dumps(debug_json))
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 2046)]
    )
    rust.enable_truncation(4)
    rust.enable_padding(length=8)
    assert len(rust.encode("x").ids) == 8
    save(tmp_path, json.loads(rust.to_str()))
    texts = ["one two three four five six seven eight", "x"]
    assert build("hf", tmp_path).encode_batch(texts) == build("hf").encode_batch(texts)


class TestSpecialTokensOfAFile:
    @pytest.mark.parametrize(
        ("settings", "ids"),
        [
            ({"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}}, (2046, 2047)),
            ({"bos_token": None, "eos_token": "<|end_of_text|>"}, (None, 2047)),
            ({"eos_token": "</s>"}, (None, None)),
            ({"eos_token": "</s>", "added_tokens_decoder": [3]}, (None, None)),
            ({}, (None, None)),
            (None, (None, None)),
        ],
    )
    def test_spellings(self, tmp_path: Path, debug_json: dict[str, Any], settings: Any, ids: Any) -> None:
        tokenizer = build("hf", save(tmp_path, debug_json, settings))
        assert (tokenizer.bos_id, tokenizer.eos_id) == ids

    def test_one_that_only_the_settings_know_counts_in_the_vocabulary(
        self, tmp_path: Path, debug_json: dict[str, Any]
    ) -> None:
        added = {"3000": {"content": "</s>", "special": True}}
        tokenizer = build("hf", save(tmp_path, debug_json, {"eos_token": "</s>", "added_tokens_decoder": added}))
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (3000, 3001)

    def test_the_file_itself_may_be_named(self, tmp_path: Path, debug_json: dict[str, Any]) -> None:
        save(tmp_path, debug_json, {"eos_token": "<|end_of_text|>"})
        assert build("hf", tmp_path / "tokenizer.json").eos_id == 2047


class TestBadFiles:
    def refused(self, path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            build("hf", path)
        assert error.value.key == "model.hf_assets_path"
        return error.value.problem

    def test_missing(self, tmp_path: Path) -> None:
        problem = self.refused(tmp_path / "nowhere")
        assert "nowhere" in problem and str(Path.cwd()) in problem

    def test_folder_without_one(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").touch()
        assert "it holds tokenizer.model" in self.refused(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '{"model": {"type": "Nonesuch"}}'])
    def test_malformed(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        problem = self.refused(tmp_path)
        assert "tokenizer.json" in problem and "\n" not in problem

    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_malformed_settings(self, tmp_path: Path, debug_json: dict[str, Any], content: str) -> None:
        save(tmp_path, debug_json)
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert "tokenizer_config.json" in self.refused(tmp_path)


def test_bytes() -> None:
    tokenizer = build("bytes")
    [ids] = tokenizer.encode_batch(["aé"])
    assert ids == [97, 0xC3, 0xA9]
    assert tokenizer.decode([256, *ids, 257]) == "aé"
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (256, None, None)


class TestResolveSpecialIds:
    @pytest.mark.parametrize(
        ("add_bos", "add_eos", "bos_id", "eos_id", "expected"),
        [
            (True, True, None, None, (2046, 2047)),
            (True, True, 5, None, (5, 2047)),
            (False, True, 5, 6, (None, 6)),
            (True, False, None, None, (2046, None)),
            (True, True, 0, 0, (0, 0)),
        ],
    )
    def test_table(self, add_bos: bool, add_eos: bool, bos_id: Any, eos_id: Any, expected: Any) -> None:
        found = resolve_special_ids(build("hf"), add_bos=add_bos, add_eos=add_eos, bos_id=bos_id, eos_id=eos_id)
        assert found == expected

    def test_none_where_one_is_asked_for(self) -> None:
        with pytest.raises(ConfigError, match=r"bytes has no EOS token.*data\.eos_id.*data\.add_eos = false") as error:
            resolve_special_ids(build("bytes"), add_bos=False, add_eos=True, bos_id=None, eos_id=None)
        assert error.value.key == "data.add_eos"

    def test_ids_by_key_need_room_in_the_model(self) -> None:
        assert required_vocab_size(build("bytes"), None, None) == 256
        assert required_vocab_size(build("bytes"), 256, 300) == 301
