"""TOKENIZERS: text to ids and back, and which ids open and close a document.

One module of tokenizers/ a kind. Reading text, and adding BOS and EOS to the stream (tokens/), do not belong here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torchtitan.errors import ConfigError
from torchtitan.registry import Registry

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


TOKENIZERS: Registry[Any] = Registry("tokenizer", home="torchtitan.data.tokenizers", receives=("path",))


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
