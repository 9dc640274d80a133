"""One id for each character of an alphabet."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from torchtitan.data.tokenizer import TOKENIZERS, Tokenizer
from torchtitan.errors import ConfigError


class Characters:
    def __init__(self, alphabet: str) -> None:
        self.name = f"characters {alphabet!r}"
        self.fingerprint = self.name
        self.ids = {character: number for number, character in enumerate(alphabet)}
        self.bos_id, self.eos_id = len(alphabet), len(alphabet) + 1
        self.vocab_size = len(alphabet) + 2

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[self.ids[character] for character in text if character in self.ids] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        characters = list(self.ids)
        return "".join(characters[i] for i in ids if i < len(characters))


@TOKENIZERS.register("characters")
def characters(
    path: str, *, alphabet: Annotated[str, Field(min_length=1, description="all characters that have an id")]
) -> Tokenizer:
    """One id for each character of an alphabet; others are left out."""
    if len(set(alphabet)) < len(alphabet):
        raise ConfigError("tokenizer.alphabet", "holds a character twice")
    return Characters(alphabet)
