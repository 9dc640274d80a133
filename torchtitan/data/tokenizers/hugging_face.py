"""Hugging Face's ``tokenizer.json``, run by their library, with the files beside it for what is special.

BOS and EOS are added to documents elsewhere (tokens/encode.py).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.data.tokenizer import KEY, TOKENIZERS, ParseSpecialTokens, Tokenizer, refuse_absurd_ids
from torchtitan.data.tokenizer_files import HUGGING_FACE, find_tokenizer_file, read_tokenizer_file
from torchtitan.errors import ConfigError, brief, one_line
from torchtitan.log import logger

if TYPE_CHECKING:
    import tokenizers


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` run by the tokenizers library (Rust, on all cores)."""

    def __init__(
        self,
        name: str,
        rust: tokenizers.Tokenizer,
        file: Path,
        *,
        fingerprint: str,
        special_tokens: dict[str, int],
        special_names: dict[str, str],
        unknown_ids: frozenset[int],
        drops: bool,
        parse_special_tokens: bool,
    ) -> None:
        self.name, self.file, self.fingerprint = name, file, fingerprint
        self.special_tokens, self.unknown_ids = special_tokens, unknown_ids
        self._rust, self._parse = rust, parse_special_tokens
        ids = {which: self.token_id(token) for which, token in special_names.items()}
        self.bos_id, self.eos_id = ids.get("bos"), ids.get("eos")
        self.absent = {which: special_names[which] for which, found in ids.items() if found is None}
        every = rust.get_vocab(with_added_tokens=True) | special_tokens
        refuse_absurd_ids(every, KEY)
        self.vocab_size = max(every.values(), default=-1) + 1
        # Characters whose fate is known, where some may be dropped.
        self._met: set[str] | None = set() if drops else None
        # A model that has special tokens among its words, as Unigram has, may find them in text by itself.
        words = rust.get_vocab(with_added_tokens=False)
        self._avoided = frozenset() if parse_special_tokens else frozenset(map(words.get, special_tokens)) - {None}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._met is not None:
            self._warn_of_loss(set().union(*texts) - self._met)
        # Not what the file's own post-processor would add: BOS and EOS come from the config, once.
        found = [e.ids for e in self._rust.encode_batch_fast(texts, add_special_tokens=False)]
        if self._avoided:
            for n, ids in enumerate(found):
                if not self._avoided.isdisjoint(ids):
                    found[n] = self._encode_as_text(texts[n])
        return found

    def _warn_of_loss(self, characters: set[str]) -> None:
        """Tell, once, of characters new to it that the model passes over; not of what is cut out before."""
        assert self._met is not None
        self._met |= characters
        for character in sorted(characters):
            text = self._rust.normalizer.normalize_str(character) if self._rust.normalizer else character
            words = self._rust.pre_tokenizer.pre_tokenize_str(text) if self._rust.pre_tokenizer else [(text, None)]
            for word, _ in words:
                covered = sum(stop - start for start, stop in (t.offsets for t in self._rust.model.tokenize(word)))
                if covered < len(word.encode()):
                    self._met = None
                    logger.warning(
                        f"the tokenizer {self.name} drops characters that it has no token for, such as {character!r}; "
                        "python -m torchtitan.data encode FILE shows where"
                    )
                    return

    def _encode_as_text(self, text: str) -> list[int]:
        """Ids of a text of which parts became special tokens: these parts are encoded in two."""
        ids: list[int] = []
        waiting = [text]
        while waiting:
            part = waiting.pop()
            encoded = self._rust.encode(part, add_special_tokens=False)
            spans = [span for i, span in zip(encoded.ids, encoded.offsets, strict=True) if i in self._avoided]
            if not spans:
                ids += encoded.ids
                continue
            if any(stop - start < 2 for start, stop in spans):
                start, stop = next(span for span in spans if span[1] - span[0] < 2)
                raise ConfigError(
                    "tokenizer.parse_special_tokens",
                    f"{part[start:stop]!r} in the text is a special token of {self.name} and cannot stay text; set it "
                    "to true, or take it out of the text",
                )
            edges = [0, *(start + 1 for start, _ in spans), len(part)]
            waiting += [part[a:b] for a, b in itertools.pairwise(edges)][::-1]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        found = self._rust.token_to_id(token)
        return self.special_tokens.get(token) if found is None else found

    def token(self, token_id: int) -> str | None:
        found = self._rust.id_to_token(token_id)
        return found if found is not None else next((t for t, i in self.special_tokens.items() if i == token_id), None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rust.encode_special_tokens = not self._parse  # which the library's pickles forget
        _stay_serial_after_forks()


@TOKENIZERS.register("hf")
def build_hf_tokenizer(path: str, *, parse_special_tokens: ParseSpecialTokens = False) -> Tokenizer:
    """Hugging Face: ``tokenizer.json``, or its folder; BOS and EOS as the files of settings beside it say."""
    _stay_serial_after_forks()
    # Set, so that the library does not warn of forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    file = _debug_file() if path == "" else find_tokenizer_file(path, HUGGING_FACE)
    content = read_tokenizer_file(file)
    try:
        rust = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(KEY, f"{file} is not a tokenizer.json this can read: {one_line(error)}") from None
    # These may stand in the file, left by whoever saved it; they would cut every document short, or draw its tokens.
    rust.no_truncation()
    rust.no_padding()
    if getattr(rust.model, "dropout", None) is not None:
        rust.model.dropout = None
    rust.encode_special_tokens = not parse_special_tokens
    settings = _settings(file.with_name("tokenizer_config.json"))
    if "added_tokens_decoder" not in settings:  # then transformers takes the older file's word
        settings |= _settings(file.with_name("special_tokens_map.json"))
    names = {which: name for which in ("bos", "eos") if (name := _content(settings.get(f"{which}_token")))}
    special = _special_tokens(rust, settings, names)
    told = json.dumps([parse_special_tokens, sorted(special.items())]).encode()
    return HuggingFaceTokenizer(
        "of the debug model" if path == "" else str(file),
        rust,
        file,
        fingerprint=hashlib.sha256(content + told).hexdigest(),
        special_tokens=special,
        special_names=names,
        unknown_ids=_unknown_ids(rust, content),
        drops=_may_drop(rust, content),
        parse_special_tokens=parse_special_tokens,
    )


@functools.cache
def _stay_serial_after_forks() -> None:
    """The library's threads do not live on in a forked process, which would wait for them for ever."""
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


def _debug_file() -> Path:
    return Path(str(importlib.resources.files("torchtitan"))) / "assets/debug_tokenizer/tokenizer.json"


def _settings(file: Path) -> dict[str, Any]:
    """Content of a file of settings, empty where there is none."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(read_tokenizer_file(file))
    except ValueError as error:
        raise ConfigError(KEY, f"{file} is not JSON: {one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ConfigError(KEY, f"{file} holds a {type(settings).__name__} where a table was expected")
    return settings


def _content(token: Any) -> str | None:
    """The text of a token, which settings hold as text or as a table."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _special_tokens(rust: tokenizers.Tokenizer, settings: dict[str, Any], names: dict[str, str]) -> dict[str, int]:
    """What is special by the file or its settings, in the order of ids; the library is told of what the file does not
    mark."""
    from tokenizers import AddedToken

    special = {token.content: i for i, token in rust.get_added_tokens_decoder().items() if token.special}
    more: dict[str, int | None] = {name: rust.token_to_id(name) for name in names.values() if len(name) > 1}
    added = settings.get("added_tokens_decoder")
    for number, entry in (added if isinstance(added, dict) else {}).items():
        content = _content(entry)
        if content and str(number).isdecimal() and isinstance(entry, dict):
            refuse_absurd_ids({content: int(number[:20])}, KEY)
            known, there = rust.token_to_id(content), rust.id_to_token(int(number))
            if there not in (None, content):
                raise ConfigError(
                    KEY,
                    f"added_tokens_decoder of tokenizer_config.json gives the id {number} to {brief(content)}, "
                    f"tokenizer.json to {brief(there)}; one of the files is of another tokenizer",
                )
            if known is None or entry.get("special"):
                more[content] = int(number) if known is None else known
    for name, token_id in more.items():
        if token_id is not None and name not in special:
            special[name] = token_id
            if rust.token_to_id(name) == token_id:
                rust.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    return dict(sorted(special.items(), key=lambda item: item[1]))


def _may_drop(rust: tokenizers.Tokenizer, content: bytes) -> bool:
    """Whether there may be text without an id: in BPE without an unknown token and without tokens for all bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    told = json.loads(content)
    if told["model"].get("type") != "BPE" or told["model"].get("unk_token") is not None:
        return False
    if told["model"].get("byte_fallback"):
        return any(rust.token_to_id(f"<0x{byte:02X}>") is None for byte in range(256))
    of_bytes = '"ByteLevel"' in json.dumps([told.get("pre_tokenizer"), told.get("normalizer")])
    return not of_bytes or any(rust.token_to_id(byte) is None for byte in ByteLevel.alphabet())


def _unknown_ids(rust: tokenizers.Tokenizer, content: bytes) -> frozenset[int]:
    model = json.loads(content)["model"]
    unknown = {model.get("unk_id")}
    if model.get("unk_token") is not None:
        unknown.add(rust.token_to_id(model["unk_token"]))
    if model.get("byte_fallback"):
        unknown |= {rust.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return frozenset(i for i in unknown if isinstance(i, int))
