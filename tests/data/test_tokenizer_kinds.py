"""What holds for a tokenizer of any kind."""

import json
import logging
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from tests.data.test_tokenizer import NASTY
from tests.data.tokenizer_kinds import KINDS, RANK_LINES, TEXT, build, make, sentencepiece_model, unigram_json
from torchtitan.data.tokenizer import DescribedTokenizer, Tokenizer, resolve_special_ids, threads
from torchtitan.data.tokens import encode
from torchtitan.data.tokens.encode import Encoding, encode_piece
from torchtitan.errors import ConfigError

FILES = {
    "hf": b'{"model": {}}',
    "tiktoken": "\n".join(RANK_LINES).encode(),
    "sentencepiece": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02",
}


class Documents:
    name = description = fingerprint = "listed"
    num_pieces = 1

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def read(self, piece: int) -> Iterator[str]:
        return iter(self.texts)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(kind: str, tmp_path: Path) -> Tokenizer:
    return make(kind, tmp_path / kind)


def test_a_document_has_one_bos_and_one_eos(kind: str, tokenizer: Tokenizer) -> None:
    """Whatever it spells, and whatever a tokenizer's own file would add."""
    ids = {"bos_id": 256, "eos_id": 257} if kind == "bytes" else {"bos_id": None, "eos_id": None}
    bos, eos = resolve_special_ids(tokenizer, add_bos=True, add_eos=True, **ids)
    opening, closing = KINDS[kind]
    texts = [TEXT[0], "", f"{opening}the{closing}", f"{closing}{opening}{opening}", f" {opening} the"]
    piece = encode_piece(Documents(*texts), 0, Encoding(tokenizer, bos, eos))
    starts = [0, *piece.ends[:-1].tolist()]
    for start, end in zip(starts, piece.ends.tolist(), strict=True):
        document = piece.ids[start:end].tolist()
        assert (document[0], document[-1]) == (bos, eos)
        assert document.count(bos) == document.count(eos) == 1
    assert len(piece.ends) == len(texts)


def test_a_document_in_parts_has_the_ids_of_the_whole(
    kind: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kind begins a part as it begins a text."""
    monkeypatch.setattr(encode, "_SEGMENT_CHARACTERS", 30)
    text = "\n".join(TEXT * 5)
    assert (
        encode_piece(Documents(text), 0, Encoding(tokenizer, None, None)).ids.tolist()
        == tokenizer.encode_batch([text])[0]
    )


@pytest.mark.parametrize("text", NASTY)
def test_what_has_bytes_gives_any_text_back(kind: str, tokenizer: Tokenizer, text: str) -> None:
    if kind == "unigram":
        text = "".join(c for c in text if tokenizer.token_id(c) is not None)  # it has letters only
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_it_tells_of_its_tokens(kind: str, tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer, DescribedTokenizer)
    for token, token_id in tokenizer.special_tokens.items():
        assert (tokenizer.token_id(token), tokenizer.token(token_id)) == (token_id, token)
    [ids] = tokenizer.encode_batch(["the"])
    assert "the" in "".join(filter(None, map(tokenizer.token, ids)))
    assert tokenizer.token(tokenizer.vocab_size) is None and tokenizer.token_id("<nonesuch>") is None
    assert tokenizer.token_id(KINDS[kind][0] or "none") == tokenizer.bos_id
    assert tokenizer.file is None or tokenizer.file.is_file()


def _encode(tokenizer: Tokenizer, texts: list[str], answers: "multiprocessing.Queue[list[list[int]]]") -> None:
    signal.alarm(60)
    answers.put(tokenizer.encode_batch(texts))


@pytest.mark.parametrize("how", ["fork", "pickle"])
def test_it_travels_to_other_processes(kind: str, tokenizer: Tokenizer, how: str) -> None:
    """After its threads were at work here, of which a forked process has none."""
    texts = [f"{KINDS[kind][0]}{text}" for text in TEXT] * 10
    expected = tokenizer.encode_batch(texts)
    if how == "pickle":
        assert pickle.loads(pickle.dumps(tokenizer)).encode_batch(texts) == expected
        return
    answers = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=_encode, args=(tokenizer, texts, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == expected


def test_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert threads() == len(os.sched_getaffinity(0))
    several = make("tiktoken", tmp_path).encode_batch(TEXT)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    assert threads() == 3
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "False")
    assert threads() == 1
    assert make("tiktoken", tmp_path).encode_batch(TEXT) == several


@pytest.mark.parametrize("name", ["hf", "tiktoken"])
def test_parsed_special_tokens_do_not_come_twice(tmp_path: Path, name: str) -> None:
    path = "" if name == "hf" else make(name, tmp_path).file
    tokenizer = build(name, str(path), parse_special_tokens=True)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    texts = ["<|begin_of_text|>the<|end_of_text|>", "the<|end_of_text|> the", "<|end_of_text|>"]
    ids = encode_piece(Documents(*texts), 0, Encoding(tokenizer, bos, eos)).ids.tolist()
    assert (ids.count(bos), ids.count(eos)) == (3, 4)
    ordinary = tokenizer.encode_batch(["t"])[0][0]  # one that text may well begin with stands before it all the same
    assert encode_piece(Documents("t"), 0, Encoding(tokenizer, ordinary, None)).ids.tolist() == [ordinary, ordinary]


class TestNamesAndIdsByKey:
    def resolved(self, tokenizer: Tokenizer, **keys: int | str) -> tuple[int | None, int | None]:
        given = {"add_bos": True, "add_eos": True, "bos_id": None, "eos_id": None} | keys
        return resolve_special_ids(tokenizer, **given)  # type: ignore[arg-type]

    def test_names(self, tmp_path: Path) -> None:
        tokenizer = make("tiktoken", tmp_path)
        found = self.resolved(tokenizer, eos_token="<|eot_id|>")
        assert found == (tokenizer.bos_id, len(RANK_LINES) + 9)
        assert self.resolved(tokenizer, eos_token=" the") == (tokenizer.bos_id, 258)

    @pytest.mark.parametrize("wanted", [True, False])
    def test_a_name_that_is_lacking(self, kind: str, tokenizer: Tokenizer, wanted: bool) -> None:
        with pytest.raises(ConfigError) as error:
            self.resolved(tokenizer, eos_token="<|eot|>", add_eos=wanted, bos_id=0)
        assert error.value.key == "data.eos_token" and "has no such token" in error.value.problem

    def test_the_nearest_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"did you mean <\|eot_id\|>\?"):
            self.resolved(make("tiktoken", tmp_path), eos_token="<|eotid|>")

    def test_an_id_in_a_hole_of_the_vocabulary(self, tmp_path: Path) -> None:
        (tmp_path / "r.tiktoken").write_text("\n".join(RANK_LINES))
        tokenizer = build("tiktoken", tmp_path, special_tokens={"<a>": 300, "<b>": 310})
        assert self.resolved(tokenizer, bos_id=300, eos_id=311) == (300, 311)
        with pytest.raises(ConfigError, match=r"no token of this id.*from 311 on") as error:
            self.resolved(tokenizer, bos_id=300, eos_id=305)
        assert error.value.key == "data.eos_id"

    def test_what_only_settings_name_is_told(self, tmp_path: Path) -> None:
        make("unigram", tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "added_tokens_decoder": {}}')
        with pytest.raises(ConfigError, match=r"no EOS token \(its files name <\|im_end\|>"):
            self.resolved(build("hf", tmp_path), add_bos=False)


class TestFinding:
    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("hf", "tokenizer.json"),
            ("tiktoken", "tokenizer.model"),
            ("tiktoken", "original/tokenizer.model"),
            ("tiktoken", "qwen.tiktoken"),
            ("sentencepiece", "tokenizer.model"),
            ("sentencepiece", "spiece.model"),
            ("sentencepiece", "m.model"),
        ],
    )
    def test_each_kind_finds_its_own(self, tmp_path: Path, name: str, file: str) -> None:
        """Beside files of other kinds, and of the same ending."""
        for number, other in enumerate(FILES):
            if other != name:
                (tmp_path / f"{number}.model").write_bytes(FILES[other])
        (tmp_path / file).parent.mkdir(exist_ok=True)
        contents = {
            "hf": json.dumps(unigram_json()).encode(),
            "tiktoken": FILES["tiktoken"],
            "sentencepiece": sentencepiece_model(),
        }
        (tmp_path / file).write_bytes(contents[name])
        tokenizer = build(name, tmp_path)
        assert isinstance(tokenizer, DescribedTokenizer) and tokenizer.file == tmp_path / file

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("other", FILES)
    def test_one_given_for_another(self, tmp_path: Path, name: str, other: str) -> None:
        if name == other:
            return
        file = tmp_path / ("tokenizer.json" if other == "hf" else "tokenizer.model")
        file.write_bytes(FILES[other])
        for path in (file, tmp_path):
            with pytest.raises(ConfigError) as error:
                build(name, path)
            assert error.value.key == "model.hf_assets_path"
            assert f'set tokenizer.name = "{other}"' in error.value.problem and file.name in error.value.problem

    @pytest.mark.parametrize("name", FILES)
    def test_nothing_there(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="it holds nothing"):
            build(name, tmp_path)
        with pytest.raises(ConfigError, match="no file or folder"):
            build(name, tmp_path / "nowhere")
        (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
        with pytest.raises(ConfigError, match="git lfs pull"):
            build(name, tmp_path / "tokenizer.model")

    @pytest.mark.parametrize("name", ["tiktoken", "sentencepiece"])
    def test_no_path(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"tokenizer.name = {name} needs a"):
            build(name)

    def test_several(self, tmp_path: Path) -> None:
        for file in ("a.tiktoken", "b.tiktoken"):
            (tmp_path / file).write_bytes(FILES["tiktoken"])
        with pytest.raises(ConfigError, match=r"holds several: a\.tiktoken, b\.tiktoken"):
            build("tiktoken", tmp_path)


class TestRankFiles:
    def refused(self, tmp_path: Path, lines: list[str]) -> str:
        (tmp_path / "tokenizer.model").write_text("\n".join(lines))
        with pytest.raises(ConfigError) as error:
            build("tiktoken", tmp_path)
        assert error.value.key == "model.hf_assets_path" and "\n" not in error.value.problem
        return error.value.problem

    def test_bad_lines_are_named(self, tmp_path: Path) -> None:
        lines = RANK_LINES
        assert "rank 256 is missing, of 259 that go up to 259" in self.refused(tmp_path, lines[:256] + lines[257:])
        assert "lines 3 and 261 have the same rank 2" in self.refused(tmp_path, [*lines, "cXVp 2"])
        assert "lines 260 and 261 have the same token" in self.refused(tmp_path, [*lines, "cXU= 260"])
        assert "no token for the byte 0x07" in self.refused(tmp_path, [*lines[:7], "dGhlbQ== 7", *lines[8:]])
        for bad in ("th 1 2", "t*h 260", "dGg= x", "dGg"):
            assert f"line 261 is not a token in base64 and a rank: {bad!r}" in self.refused(tmp_path, [*lines, bad])

    def test_special_tokens_are_those_of_llama_3(self, tmp_path: Path) -> None:
        tokenizer = make("tiktoken", tmp_path)
        first = len(RANK_LINES)
        assert isinstance(tokenizer, DescribedTokenizer)
        assert tokenizer.vocab_size == first + 256 == max(tokenizer.special_tokens.values()) + 1
        names = {tokenizer.token(first + n): n for n in range(256)}
        known = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|eot_id|>": 9}
        known |= {"<|reserved_special_token_4|>": 8, "<|reserved_special_token_5|>": 10}
        assert names.items() >= (known | {"<|reserved_special_token_250|>": 255}).items()

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"special_tokens": ["<a>", "<a>"]}, "special_tokens: holds a name twice"),
            ({"special_tokens": ["<a>", ""]}, "special_tokens: holds an empty name"),
            ({"special_tokens": {"<a>": 259}}, "special_tokens: <a> has the id 259, which is a rank"),
            ({"special_tokens": {"<a>": 260, "<b>": 260}}, "special_tokens: <b> and <a> have the same id 260"),
            (
                {"special_tokens": {"<a>": 2**31}},
                "special_tokens: <a> has an absurd id, 2147483648; ids end at 2147483647",
            ),
            ({"special_tokens": {"<a>": 10**99}}, "special_tokens: <a> has an absurd id, 1000"),
            ({"pattern": "("}, "pattern: is no regular expression"),
            ({"pattern": r"\w*|\W+"}, "pattern: matches no text at all"),
            ({"pattern": r"\w+|\s|(?=,)|\W"}, "pattern: matches no text at all"),
            ({"pattern": r"\w+"}, r"pattern: leaves text out, such as '\x00'"),
            ({"pattern": r"\w+|[^\w\n]+"}, r"pattern: leaves text out, such as '\n'"),
            ({"pattern": r"\w+|[^\w\s]+|\s+$|\s(?=\w)|\s+(?=\n)"}, "pattern: leaves text out, such as "),
            ({"pattern": r"[\x00-\x7f]+|\p{L}+"}, r"pattern: leaves text out, such as '\x80'"),
        ],
    )
    def test_bad_options(self, tmp_path: Path, options: dict[str, object], problem: str) -> None:
        make("tiktoken", tmp_path)
        with pytest.raises(ConfigError) as error:
            build("tiktoken", tmp_path, **options)
        assert f"tokenizer.{problem}" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n\x0e\n\x05<unk>", b"junk", bytes(99), b"a text\n" * 9])
def test_a_bad_sentencepiece_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not a model of sentencepiece: it is (empty|another kind)") as error:
        build("sentencepiece", tmp_path)
    assert error.value.key == "model.hf_assets_path" and "\n" not in error.value.problem and ".cc" not in str(error)


def test_sentencepiece_without_bos_has_none(tmp_path: Path) -> None:
    (tmp_path / "m.model").write_bytes(sentencepiece_model(bos_id=-1))
    tokenizer = build("sentencepiece", tmp_path)
    assert tokenizer.bos_id is None and tokenizer.eos_id is not None


def test_what_the_vocabulary_lacks_is_unknown(tmp_path: Path) -> None:
    for kind, text in (("unigram", "é"), ("sentencepiece", "é")):
        tokenizer = make(kind, tmp_path / kind)
        assert isinstance(tokenizer, DescribedTokenizer)
        assert len(tokenizer.unknown_ids) == (1 if kind == "unigram" else 257)
        [ids] = tokenizer.encode_batch([text])
        assert sum(i in tokenizer.unknown_ids for i in ids) == (1 if kind == "unigram" else 2)


class TestHuggingFaceFiles:
    def test_special_tokens_that_only_settings_mark(self, tmp_path: Path) -> None:
        """They are words of the vocabulary like others, and no text becomes one."""
        content = unigram_json()
        content["added_tokens"] = []
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        entry = {"content": "<s>", "special": True}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": {"1": entry}, "eos_token": "</s>", "pad_token": "t"})
        )
        plain, parsed = build("hf", tmp_path), build("hf", tmp_path, parse_special_tokens=True)
        assert isinstance(plain, DescribedTokenizer) and plain.special_tokens == {"<s>": 1, "</s>": 2}
        assert not {1, 2} & set(plain.encode_batch(["<s>the</s><s>"])[0])
        assert [i for i in parsed.encode_batch(["<s>the</s><s>"])[0] if i in (1, 2)] == [1, 2, 1]
        assert plain.decode(plain.encode_batch(["<s>the</s><s>"])[0]) == "<s>the</s><s>"

    def test_tokens_are_not_drawn(self, tmp_path: Path) -> None:
        """Left in a file by who trained with BPE dropout."""
        bpe = tokenizers.models.BPE({"t": 0, "h": 1, "th": 2}, [("t", "h")], dropout=0.5)
        (tmp_path / "tokenizer.json").write_text(tokenizers.Tokenizer(bpe).to_str())
        assert build("hf", tmp_path).encode_batch(["thth"] * 20) == [[2, 2]] * 20

    def test_settings_of_another_tokenizer_are_refused(self, tmp_path: Path) -> None:
        """Else BOS would be the id of a letter."""
        bpe = tokenizers.models.BPE({"t": 0, "h": 1, "th": 2}, [("t", "h")])
        (tmp_path / "tokenizer.json").write_text(tokenizers.Tokenizer(bpe).to_str())
        for number, problem in (
            (1, "gives the id 1 to <zero>, tokenizer.json to h; one"),
            (2**31, "<zero> has an absurd id, 2147483648"),
            ("9" * 5000, "<zero> has an absurd id, 999"),
        ):
            added = {number: {"content": "<zero>", "special": True}}
            (tmp_path / "tokenizer_config.json").write_text(
                json.dumps({"bos_token": "<zero>", "added_tokens_decoder": added})
            )
            with pytest.raises(ConfigError, match=problem) as error:
                build("hf", tmp_path)
            assert error.value.key == "model.hf_assets_path"

    def test_an_absurd_id(self, tmp_path: Path) -> None:
        content = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE({"t": 0}, [])).to_str())
        content["model"]["vocab"]["h"] = 2**32 - 1
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="h has an absurd id, 4294967295; ids end at 2147483647"):
            build("hf", tmp_path)

    @pytest.mark.parametrize("by_bytes", [False, True])
    def test_characters_that_are_dropped_are_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, by_bytes: bool
    ) -> None:
        monkeypatch.setattr(logging.getLogger("titan"), "propagate", True)
        rust = tokenizers.Tokenizer(tokenizers.models.BPE({"t": 0, "h": 1, "th": 2, "Ã": 3}, [("t", "h")]))
        rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        if by_bytes:
            rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        (tmp_path / "tokenizer.json").write_text(rust.to_str())
        tokenizer = build("hf", tmp_path)
        tokenizer.encode_batch(["th" if by_bytes else " th\n", "h"])  # space is cut out, on purpose
        assert not caplog.messages
        for _ in range(2):
            tokenizer.encode_batch(["th", "thé"])  # of whose two bytes one has a token
        assert [message for message in caplog.messages if "drops characters" in message and "'é'" in message]
        assert len(caplog.messages) == 1

    def test_a_vocabulary_of_all_bytes_drops_none(self) -> None:
        assert build("hf")._met is None  # type: ignore[attr-defined]

    def test_a_special_token_of_one_character_is_refused_in_text(self, tmp_path: Path) -> None:
        content = unigram_json()
        content["added_tokens"][0] |= {
            "content": "q",
            "id": next(i for i, (word, _) in enumerate(content["model"]["vocab"]) if word == "q"),
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="'q' in the text is a special token"):
            build("hf", tmp_path).encode_batch(["the quick"])
