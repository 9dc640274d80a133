"""TOKENIZERS: text to ids and back, and which ids open and close a document.

One module of tokenizers/ a kind. Reading text, and adding BOS and EOS to the stream (tokens/), do not belong here.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from torchtitan.config.options import nearest
from torchtitan.config.schema import Data
from torchtitan.errors import ConfigError, brief
from torchtitan.platforms import cores
from torchtitan.registry import Registry

KEY = "model.hf_assets_path"

ParseSpecialTokens = Annotated[
    bool, Field(description="text that spells a special token becomes that token (false: it stays plain text)")
]
"""Option of kinds that can do so."""


class Tokenizer(Protocol):
    """What a registered builder ``(path, *, options)`` returns; ``path`` is ``model.hf_assets_path``.

    It travels to other processes, by a fork or by pickle.
    """

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


@runtime_checkable
class DescribedTokenizer(Tokenizer, Protocol):
    """A tokenizer that tells of its tokens as well: only of such ones can tokens be named in a configuration."""

    file: Path | None
    """What it was read from."""
    special_tokens: Mapping[str, int]
    """Tokens that no text becomes unless that is asked for, by what they are called."""
    unknown_ids: frozenset[int]
    """Ids of text that the vocabulary lacks: of the unknown token, and of bytes where whole words have ids."""
    absent: Mapping[str, str]
    """``{"eos": "</s>"}`` where the tokenizer's own files name a token for it that they do not have."""

    def token_id(self, token: str) -> int | None:
        """Id of the token that is called so."""
        ...

    def token(self, token_id: int) -> str | None:
        """What the token is called; None where no token has this id."""
        ...


MOST_ID = 2**31 - 1
"""Largest id that files of tokens, and whoever counts in int32, can hold."""

TOKENIZERS: Registry[Any] = Registry("tokenizer", home="torchtitan.data.tokenizers", receives=("path",))


def refuse_absurd_ids(tokens: Mapping[str, int], key: str) -> None:
    """ConfigError, on ``key``, for a token with an id above ``MOST_ID``."""
    token, token_id = max(tokens.items(), key=operator.itemgetter(1), default=("", 0))
    if token_id > MOST_ID:
        raise ConfigError(key, f"{brief(token)} has an absurd id, {brief(str(token_id))}; ids end at {MOST_ID}")


def threads() -> int:
    """How many threads ``encode_batch`` takes: one for each core that this process may use.

    The variables of the tokenizers library hold for all kinds: TOKENIZERS_PARALLELISM=false means one,
    RAYON_NUM_THREADS says how many.
    """
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "off", "no", "f", "n", "0"):
        return 1
    number = os.environ.get("RAYON_NUM_THREADS", "")
    if number.isdecimal() and int(number) > 0:
        return int(number)
    return cores()


def resolve_special_ids(
    tokenizer: Tokenizer,
    *,
    add_bos: bool,
    add_eos: bool,
    bos_id: int | None,
    eos_id: int | None,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> tuple[int | None, int | None]:
    """The ids put before and after each document, None where none is wanted.

    A name or an id given by key wins over the tokenizer's own. ConfigError where one is wanted and neither has it, and
    where a key names what the tokenizer lacks; ids above its vocabulary are the caller's to check.
    """

    def resolve(which: str, wanted: bool, token: str | None, by_key: int | None, own: int | None) -> int | None:
        if token is not None:
            found: int | None = _named(tokenizer, token, which)
        elif by_key is not None:
            found = _numbered(tokenizer, by_key, which)
        else:
            found = own
        if found is None and wanted:
            known = tokenizer if isinstance(tokenizer, DescribedTokenizer) else None
            absent = known.absent.get(which) if known else None
            raise ConfigError(
                f"data.add_{which}",
                f"the tokenizer {tokenizer.name} has no {which.upper()} token"
                f"{f' (its files name {brief(absent)}, which is not in its vocabulary)' if absent else ''}; "
                f"give its id as data.{which}_id{f' or its name as data.{which}_token' if known else ''}, "
                f"or set data.add_{which} = false",
            )
        return found if wanted else None

    return (
        resolve("bos", add_bos, bos_token, bos_id, tokenizer.bos_id),
        resolve("eos", add_eos, eos_token, eos_id, tokenizer.eos_id),
    )


def special_ids(tokenizer: Tokenizer, keys: Data) -> tuple[int | None, int | None]:
    """``resolve_special_ids`` as ``[data]`` has it."""
    return resolve_special_ids(tokenizer, **keys.model_dump(include=_EDGE_KEYS))


_EDGE_KEYS = {"add_bos", "add_eos", "bos_id", "eos_id", "bos_token", "eos_token"}


def _named(tokenizer: Tokenizer, token: str, which: str) -> int:
    key = f"data.{which}_token"
    if not isinstance(tokenizer, DescribedTokenizer):
        raise ConfigError(key, f"the tokenizer {tokenizer.name} has no names for tokens; give data.{which}_id instead")
    found = tokenizer.token_id(token)
    if found is None:
        near = nearest(token, tokenizer.special_tokens)
        some = ", ".join(list(tokenizer.special_tokens)[:8]) or "none"
        hint = f"did you mean {near}?" if near else f"its special tokens: {some}"
        raise ConfigError(key, f"the tokenizer {tokenizer.name} has no such token; {hint}")
    return found


def _numbered(tokenizer: Tokenizer, token_id: int, which: str) -> int:
    inside = token_id < tokenizer.vocab_size
    if inside and isinstance(tokenizer, DescribedTokenizer) and tokenizer.token(token_id) is None:
        raise ConfigError(
            f"data.{which}_id",
            f"the tokenizer {tokenizer.name} has no token of this id; "
            f"take one that it has, or one of its own from {tokenizer.vocab_size} on",
        )
    return token_id


def required_vocab_size(tokenizer: Tokenizer, *special_ids: int | None) -> int:
    """Rows an embedding needs for all ids of ``tokenizer`` and the given special ones."""
    return max(tokenizer.vocab_size, *(1 + i for i in special_ids if i is not None), 1)
