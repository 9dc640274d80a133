"""Bytes of UTF-8 as tokens.

Nothing else belongs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan.data.tokenizer import TOKENIZERS, Tokenizer


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255; it has no BOS and EOS of its own."""

    name = "bytes"
    vocab_size = 256
    bos_id: int | None = None
    eos_id: int | None = None
    fingerprint = "utf-8"
    file: Path | None = None
    special_tokens: Mapping[str, int] = {}
    unknown_ids: frozenset[int] = frozenset()
    absent: Mapping[str, str] = {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # Ids that the config added as BOS and EOS lie above the bytes and have no text.
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return token.encode()[0] if len(token.encode()) == 1 else None

    def token(self, token_id: int) -> str | None:
        return (chr(token_id) if token_id < 128 else f"<0x{token_id:02X}>") if token_id < 256 else None


@TOKENIZERS.register("bytes")
def build_bytes_tokenizer(path: str) -> Tokenizer:
    """Bytes: needs no file; ids for BOS and EOS come from ``data.bos_id`` and ``data.eos_id``."""
    return BytesTokenizer()
