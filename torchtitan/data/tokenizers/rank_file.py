"""Rank files of tiktoken, such as Llama 3's ``tokenizer.model``: a token in base64 and its rank a line.

Nothing is fetched: pattern and special tokens, which the file does not hold, are options.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from torchtitan.data.tokenizer import KEY, TOKENIZERS, ParseSpecialTokens, Tokenizer, refuse_absurd_ids, threads
from torchtitan.data.tokenizer_files import RANKS, find_tokenizer_file, read_tokenizer_file
from torchtitan.errors import ConfigError, brief, one_line

if TYPE_CHECKING:
    import tiktoken

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"


def _llama3_special_tokens() -> list[str]:
    """The 256 of Llama 3 as Meta published them, in the order of their ids."""

    def reserved(*numbers: int) -> list[str]:
        return [f"<|reserved_special_token_{n}|>" for n in numbers]

    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    return [_BOS, _EOS, *reserved(0, 1, 2, 3), *headers, *reserved(4), "<|eot_id|>", *reserved(*range(5, 251))]


class RankFileTokenizer:
    """A rank file run by tiktoken, on all cores."""

    unknown_ids: frozenset[int] = frozenset()
    """None: every byte has an id."""

    def __init__(
        self, encoding: tiktoken.Encoding, special_tokens: dict[str, int], file: Path, *, fingerprint: str, parse: bool
    ) -> None:
        self.name, self.file, self.fingerprint = str(file), file, fingerprint
        self.special_tokens = special_tokens
        self.vocab_size = encoding.max_token_value + 1
        self.bos_id, self.eos_id = special_tokens.get(_BOS), special_tokens.get(_EOS)
        self.absent: dict[str, str] = {}
        self._encoding, self._parse = encoding, parse

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        number = threads()
        if self._parse:
            return self._encoding.encode_batch(texts, num_threads=number, allowed_special="all")
        if number == 1:
            return [self._encoding.encode_ordinary(text) for text in texts]
        return self._encoding.encode_ordinary_batch(texts, num_threads=number)

    def decode(self, ids: Sequence[int]) -> str:
        # Ids that the config added as BOS and EOS may lie above, and have no text.
        return self._encoding.decode([i for i in ids if i < self.vocab_size])

    def token_id(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    def token(self, token_id: int) -> str | None:
        try:
            content = self._encoding.decode_single_token_bytes(token_id)
        except (KeyError, OverflowError):
            return None
        try:
            return content.decode()
        except UnicodeDecodeError:  # parts of characters, spelled as sentencepiece does
            return "".join(f"<0x{byte:02X}>" for byte in content)


@TOKENIZERS.register("tiktoken")
def build_rank_file_tokenizer(
    path: str,
    *,
    pattern: Annotated[str, Field(description="regular expression that cuts text into words; Llama 3's")] = _PATTERN,
    special_tokens: Annotated[
        list[str] | dict[str, int] | None,
        Field(description="names in the order of the ids after the last rank, or a table of ids; none: Llama 3's 256"),
    ] = None,
    parse_special_tokens: ParseSpecialTokens = False,
) -> Tokenizer:
    """tiktoken: a rank file, or the folder with ``tokenizer.model`` or ``original/tokenizer.model``."""
    import tiktoken

    file = find_tokenizer_file(path, RANKS)
    content = read_tokenizer_file(file)
    ranks = read_ranks(content, file)
    special = _numbered(_llama3_special_tokens() if special_tokens is None else special_tokens, ranks)
    try:
        encoding = tiktoken.Encoding(str(file), pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise ConfigError("tokenizer.pattern", f"is no regular expression: {one_line(error)}") from None
    _refuse_loss(encoding, pattern)
    told = json.dumps([pattern, special, parse_special_tokens]).encode()
    return RankFileTokenizer(
        encoding, special, file, fingerprint=hashlib.sha256(content + told).hexdigest(), parse=parse_special_tokens
    )


def _refuse_loss(encoding: tiktoken.Encoding, pattern: str) -> None:
    """ConfigError for a pattern that leaves text out, which would be lost in silence, or finds words without a letter,
    at which the library breaks down. Tried on each character of the basic plane, and on those of ASCII two by two."""
    import regex

    ascii_ = [chr(code) for code in range(128)]
    samples = [a + b for a in ascii_ for b in ascii_]
    samples += [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000] + ["\N{GRINNING FACE}", "𠀀", "𝐀"]
    everything = "".join(samples)
    with contextlib.suppress(regex.error):  # the library reads a language of its own
        if any(match.start() == match.end() for match in regex.finditer(pattern, everything)):
            raise ConfigError("tokenizer.pattern", "matches no text at all in some places; make it match one or more")

    def lost(text: str) -> bool:
        return encoding.decode_bytes(encoding.encode_ordinary(text)) != text.encode()

    if lost(everything):
        which = next(filter(lost, samples[len(ascii_) ** 2 :] + samples), "")
        raise ConfigError(
            "tokenizer.pattern", f"leaves text out, such as {which!r}, which training would not see; add |(?s:.) to it"
        )


def read_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    """Rank of each token; ConfigError, with the line, for what no such file holds, and for ranks that are missing or
    there twice, tokens that are, and bytes without a token, of which text could hold some."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError(KEY, f"{file} is not a whole rank file: {problem}")

    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text, rank_text = line.split()
            token, rank = base64.b64decode(text, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            shown = brief(line.decode(errors="replace"))
            raise refuse(f"line {number} is not a token in base64 and a rank: {shown!r}") from None
        if rank in lines:
            raise refuse(f"lines {lines[rank]} and {number} have the same rank {rank}")
        if token in ranks:
            raise refuse(f"lines {lines[ranks[token]]} and {number} have the same token {brief(repr(token))}")
        ranks[token] = rank
        lines[rank] = number
    missing = next((rank for rank in range(len(lines)) if rank not in lines), None)
    if missing is not None:
        raise refuse(f"rank {missing} is missing, of {len(lines)} that go up to {max(lines)}")
    byte = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if byte is not None:
        raise refuse(f"no token for the byte 0x{byte:02x}")
    return ranks


def _numbered(tokens: list[str] | dict[str, int], ranks: dict[bytes, int]) -> dict[str, int]:
    key = "tokenizer.special_tokens"
    first = len(ranks)
    special = tokens if isinstance(tokens, dict) else {token: first + n for n, token in enumerate(tokens)}
    if len(special) < len(tokens):
        raise ConfigError(key, "holds a name twice")
    if "" in special:
        raise ConfigError(key, "holds an empty name")
    taken: dict[int, str] = {}
    for token, number in special.items():
        if number < first:
            raise ConfigError(key, f"{token} has the id {number}, which is a rank of the file; ids begin at {first}")
        if number in taken:
            raise ConfigError(key, f"{token} and {taken[number]} have the same id {number}")
        taken[number] = token
    refuse_absurd_ids(special, key)
    return special
