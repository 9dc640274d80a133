"""What must not be shown: which keys hold secrets, where a URL does, and how any text loses them before it is written.

Which configuration is meant is not known here; whoever reads one says what it holds (``hide``).
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

MASK = "***"
_SECRET_WORDS = {"token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials"}
_NEVER_A_COUNT = _SECRET_WORDS - {"token"}
_SECRET_NAMES = re.compile(
    r"(api|access|private|secret)_?key|(auth|access|bearer|session|refresh)_?token|authorization"
)
_SPECIAL_TOKENS = re.compile(r"(bos|eos|pad|unk|mask|sep|cls|special)_token")
# One slash will do: a URL that was taken for a path has lost the other. An @ may stand in a password.
_USER_IN_URL = re.compile(r"(?<=:/)(/?)[^/\s:@'\"]*:[^/\s'\"]*(?=@)")
_TOKEN_IN_URL = re.compile(r"(?<=https:/)(/?)[^/\s:@'\"]+(?=@)|(?<=http:/)(/?)[^/\s:@'\"]+(?=@)")
_QUERY_IN_URL = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"]+)")
_SIGNATURES = {"sig", "signature", "x_amz_signature", "x_goog_signature", "key"}
_NUMBER = re.compile(r"[\d.]+")
_SHORTEST = 4
_COMMON = {"true", "false", "none", "null"}

_hidden: set[str] = set()
"""Texts that stand for a secret in this process."""


def masked(key: str, value: Any) -> Any:
    """``value`` as it may be shown: what ``key`` calls a secret is hidden, and so are passwords in URLs."""
    if isinstance(value, Mapping):
        return {name: masked(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(key, inner) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if _is_secret(key, number=True) else value
    if not isinstance(value, str) or not value:
        return value
    return type(value)(MASK if _is_secret(key) else without_urls_secrets(value))


def without_urls_secrets(text: str) -> str:
    """``text`` with what URLs in it say of a user, and their signatures, hidden."""
    text = _USER_IN_URL.sub(rf"\g<1>{MASK}", text)
    text = _TOKEN_IN_URL.sub(lambda match: f"{match[1] or match[2] or ''}{MASK}", text)

    def parameter(match: re.Match[str]) -> str:
        name = match[1].lower().replace("-", "_")
        return f"{match[1]}={MASK}" if _is_secret(name) or name in _SIGNATURES else match[0]

    return _QUERY_IN_URL.sub(parameter, text)


def hide(key: str, value: Any) -> None:
    """From now on hide, in every text that passes ``hidden``, what of ``value`` must not be shown."""
    for secret in _secrets_in(key, value):
        if len(secret) >= _SHORTEST and secret.lower() not in _COMMON:
            # As it is, and as it stands in a traceback or a file.
            _hidden.update({secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]})


def hidden(text: str) -> str:
    """``text`` without the secrets that this process has been told of, nor any in URLs."""
    for secret in sorted(_hidden, key=len, reverse=True):  # one may begin with another
        text = text.replace(secret, MASK)
    return without_urls_secrets(text)


def hide_in_tracebacks() -> None:
    """Let what nobody caught be shown without secrets as well."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(hidden("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)

    sys.excepthook = show


def _secrets_in(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets_in(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets_in(key, inner)
    elif _is_secret(key, number=not isinstance(value, str) or bool(_NUMBER.fullmatch(value))):
        yield str(value)
    elif isinstance(value, str):
        for user in _USER_IN_URL.finditer(value):
            yield user[0].lstrip("/").partition(":")[2]
        for token in _TOKEN_IN_URL.finditer(value):
            yield token[0].lstrip("/")


def _is_secret(key: str, *, number: bool = False) -> bool:
    """Whether ``key``, or a table it stands in, holds a secret; a ``number`` of tokens is none."""
    words = _NEVER_A_COUNT if number else _SECRET_WORDS
    for name in key.lower().replace("-", "_").split("."):
        if not _SPECIAL_TOKENS.fullmatch(name) and (words & set(name.split("_")) or _SECRET_NAMES.search(name)):
            return True
    return False
