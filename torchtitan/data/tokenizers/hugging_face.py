"""Hugging Face's ``tokenizer.json``, run by their library, with ``tokenizer_config.json`` for what is special.

BOS and EOS are added to documents elsewhere (tokens/cache.py).
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from torchtitan.data.tokenizer import KEY, TOKENIZERS, Tokenizer
from torchtitan.errors import ConfigError, one_line

if TYPE_CHECKING:
    import tokenizers


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` run by the tokenizers library (Rust, on all cores)."""

    def __init__(
        self,
        name: str,
        rust: tokenizers.Tokenizer,
        *,
        fingerprint: str,
        bos_id: int | None,
        eos_id: int | None,
    ) -> None:
        self.name, self.fingerprint, self.bos_id, self.eos_id = name, fingerprint, bos_id, eos_id
        self._rust = rust
        largest = max(rust.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = max(largest, *(i for i in (bos_id, eos_id) if i is not None), -1) + 1

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        # Not what the file's own post-processor would add: BOS and EOS come from the config, once.
        return [e.ids for e in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=False)


@TOKENIZERS.register("hf")
def build_hf_tokenizer(
    path: str,
    *,
    parse_special_tokens: Annotated[
        bool,
        Field(description="text that spells a special token becomes that token (false: it stays plain text)"),
    ] = False,
) -> Tokenizer:
    """Hugging Face: a folder with ``tokenizer.json`` (BOS and EOS from ``tokenizer_config.json``), or that file."""
    # Set, so that loader workers forked later do not each print the library's warning about forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    file = tokenizer_file(path)
    content = _read(file)
    try:
        rust = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(KEY, f"{file} is not a tokenizer.json this can read: {one_line(error)}") from None
    # Both may stand in the file, left by whoever saved it; they would cut every document short.
    rust.no_truncation()
    rust.no_padding()
    rust.encode_special_tokens = not parse_special_tokens
    settings = _settings(file.with_name("tokenizer_config.json"))
    return HuggingFaceTokenizer(
        "of the debug model" if path == "" else str(file),
        rust,
        fingerprint=hashlib.sha256(content + bytes([parse_special_tokens])).hexdigest(),
        bos_id=_special_id(settings, "bos_token", rust),
        eos_id=_special_id(settings, "eos_token", rust),
    )


def tokenizer_file(path: str) -> Path:
    """The file that ``model.hf_assets_path`` means; ConfigError if there is none."""
    if path == "":
        return Path(str(importlib.resources.files("torchtitan"))) / "assets/debug_tokenizer/tokenizer.json"
    given = Path(path).expanduser()
    if given.is_dir():
        if (given / "tokenizer.json").is_file():
            return given / "tokenizer.json"
        others = ", ".join(sorted(p.name for p in given.iterdir())[:8]) or "nothing"
        raise ConfigError(KEY, f"no tokenizer.json in {path} (it holds {others})")
    if not given.is_file():
        raise ConfigError(KEY, f"there is no file or folder {path} (working directory {os.getcwd()})")
    return given


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {file}: {error.strerror}") from None


def _settings(file: Path) -> dict[str, Any]:
    """Content of a ``tokenizer_config.json``, empty where there is none."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(KEY, f"{file} is not JSON: {one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ConfigError(KEY, f"{file} holds a {type(settings).__name__} where a table was expected")
    return settings


def _special_id(settings: dict[str, Any], which: str, rust: tokenizers.Tokenizer) -> int | None:
    """Id of the token that ``tokenizer_config.json`` names, None where it names none or one without an id."""
    token = settings.get(which)
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    found = rust.token_to_id(token)
    if found is not None:
        return found
    added = settings.get("added_tokens_decoder")
    for number, entry in (added if isinstance(added, dict) else {}).items():
        if isinstance(entry, dict) and entry.get("content") == token and number.isdecimal():
            return int(number)
    return None
