"""TOKENIZERS: text to ids and back, and which ids open and close a document.

Reading text, and adding BOS and EOS to the stream (tokens.py), do not belong here.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field

from torchtitan.errors import ConfigError, one_line
from torchtitan.registry import Registry

if TYPE_CHECKING:
    import tokenizers

KEY = "model.hf_assets_path"


class Tokenizer(Protocol):
    """What a registered builder ``(path, *, options)`` returns; ``path`` is ``model.hf_assets_path``."""

    name: str
    """For messages and logs."""
    vocab_size: int
    """Largest id + 1, so that an embedding of this many rows holds every id."""
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    """Equal only where the same text gives the same ids."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS and EOS: who packs the documents adds them, once."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


TOKENIZERS: Registry[Any] = Registry("tokenizer", home=__name__, receives=("path",))


def resolve_special_ids(
    tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool, bos_id: int | None, eos_id: int | None
) -> tuple[int | None, int | None]:
    """The ids put before and after each document, None where none is wanted.

    An id given by key wins over the tokenizer's own. ConfigError where one is wanted and neither has it.
    """

    def resolve(name: str, wanted: bool, by_key: int | None, own: int | None) -> int | None:
        if not wanted:
            return None
        found = own if by_key is None else by_key
        if found is None:
            raise ConfigError(
                f"data.add_{name}",
                f"the tokenizer {tokenizer.name} has no {name.upper()} token; "
                f"give its id as data.{name}_id, or set data.add_{name} = false",
            )
        return found

    return (
        resolve("bos", add_bos, bos_id, tokenizer.bos_id),
        resolve("eos", add_eos, eos_id, tokenizer.eos_id),
    )


def required_vocab_size(tokenizer: Tokenizer, *special_ids: int | None) -> int:
    """Rows an embedding needs for all ids of ``tokenizer`` and the given special ones."""
    return max(tokenizer.vocab_size, *(1 + i for i in special_ids if i is not None), 1)


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


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255; it has no BOS and EOS of its own."""

    name = "bytes"
    vocab_size = 256
    bos_id: int | None = None
    eos_id: int | None = None
    fingerprint = "utf-8"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # Ids that the config added as BOS and EOS lie above the bytes and have no text.
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@TOKENIZERS.register("bytes")
def build_bytes_tokenizer(path: str) -> Tokenizer:
    """Bytes: needs no file; ids for BOS and EOS come from ``data.bos_id`` and ``data.eos_id``."""
    return BytesTokenizer()
