"""Text tokenised once into a file of ids that all ranks map into memory.

Reading text (datasets.py) and cutting the ids into training rows (packing.py) do not belong here.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from torchtitan.data.datasets import Passage, Skipped, TextSource
from torchtitan.data.files import PLACES_TO_CUT
from torchtitan.data.sharing import make_together
from torchtitan.data.tokenizer import Tokenizer, required_vocab_size
from torchtitan.errors import ConfigError
from torchtitan.log import logger
from torchtitan.secrets import hidden

# Raised by who changes what the ids of a given source and tokenizer are, so that old files are not taken for new.
_FORMAT = 1
# Files up to this size are read and compared with their hash when they are opened; larger ones by their size alone.
_VERIFIED_BYTES = 1 << 28
_SEGMENT_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 21
_PLACES_TO_CUT = [re.compile(pattern) for pattern in PLACES_TO_CUT]


@dataclass(frozen=True)
class TokenHeader:
    """What is known of a token file without reading it; written last, so that it says the file is whole."""

    format: int
    dtype: str
    tokens: int
    documents: int
    skipped: int
    first_skipped: str
    text_bytes: int
    fingerprint: str
    """Hash of the ids: equal only where two files hold the same tokens in the same order."""
    made_from: dict[str, Any]


class TokenFile:
    """Ids of all documents in order, mapped into memory; pickles as its path, so that it travels to workers."""

    def __init__(self, path: Path, header: TokenHeader) -> None:
        self.path, self.header = path, header
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A plain array, for slices of np.memmap cost several times as much.
        self._ids = np.frombuffer(content, dtype=np.dtype(header.dtype).newbyteorder("<"))

    def __len__(self) -> int:
        return self.header.tokens

    @property
    def fingerprint(self) -> str:
        return self.header.fingerprint

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """``length`` ids from ``start`` on, ``[length]``; the file goes on from its beginning after its end."""
        start %= len(self)
        if start + length <= len(self):
            return self._ids[start : start + length].astype(np.int64)
        return self._ids[np.arange(start, start + length) % len(self)].astype(np.int64)

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path, TokenHeader]]:
        return TokenFile, (self.path, self.header)


def open_tokens(
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    bos_id: int | None,
    eos_id: int | None,
    cache_folder: str = "",
    rank: int = 0,
    ranks: int = 1,
) -> TokenFile:
    """The token file of ``source``: from the cache, or made now, together with the other ranks on this file system.

    ``bos_id`` and ``eos_id`` come before and after each document where they are not None. Needs no process group:
    ranks find each other in ``cache_folder`` (empty: the user's), and each begins with its own share of the text.
    Raises ConfigError for text that cannot be read, a source without any token, and a folder that cannot be used.
    """
    recipe = {
        "format": _FORMAT,
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "bos_id": bos_id,
        "eos_id": eos_id,
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    folder = Path(cache_folder or _users_cache()).expanduser()
    path = folder / f"{source.name}-{digest[:20]}.bin"
    dtype = "uint16" if required_vocab_size(tokenizer, bos_id, eos_id) <= 1 << 16 else "uint32"
    made_from = {**recipe, "source_name": hidden(source.description), "tokenizer_name": tokenizer.name}
    started = time.monotonic()
    try:
        found = _read_header(path, verify=True)
        if found is None:
            logger.info(f"tokenising {source.name} ({source.description}), once, into {path}")
            # Told more often on a terminal than in a log, and not at all where it is soon done.
            often = 0.5 if sys.stderr.isatty() else 30.0
            with tqdm(
                desc=f"tokenising {source.name}",
                total=source.num_pieces,
                unit="piece",
                disable=rank != 0,
                delay=1,
                mininterval=often,
            ) as bar:
                make_together(
                    path.with_suffix(".work"),
                    source.num_pieces,
                    make=lambda k, part: _encode_piece(source, k, tokenizer, bos_id, eos_id, dtype, part),
                    assemble=lambda parts: _assemble(parts, path, dtype, made_from),
                    finished=lambda: _read_header(path) is not None,
                    start=rank * source.num_pieces // ranks,
                    progress=lambda done: bar.update(done - bar.n),
                )
        header = found or _read_header(path)
        assert header is not None
        tokens = TokenFile(path, header)
    except OSError as error:
        raise ConfigError(
            "data.cache_folder", f"cannot keep token files in {folder} ({error}); name another folder"
        ) from error
    how = "from" if found else f"tokenised in {time.monotonic() - started:.1f} s into"
    counts = f"{header.tokens:,} tokens of {header.documents:,} documents"
    logger.info(f"{source.name}: {counts} ({source.description}), {how} {path}")
    if header.skipped:
        logger.warning(f"{source.name}: {header.skipped:,} bad records skipped, the first: {header.first_skipped}")
    return tokens


def _users_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchtitan" / "tokens"
    except RuntimeError:
        raise ConfigError("data.cache_folder", "no home folder to keep token files in; name a folder") from None


def _hash(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)


def _read_header(path: Path, *, verify: bool = False) -> TokenHeader | None:
    """What stands beside the token file at ``path``, None where either is missing or they do not fit together."""
    try:
        header = TokenHeader(**json.loads(path.with_suffix(".json").read_bytes()))
        expected, size = header.tokens * np.dtype(header.dtype).itemsize, path.stat().st_size
        if size != expected or size == 0:
            problem = f"{size:,} bytes where {expected:,} were written"
        elif verify and size <= _VERIFIED_BYTES and _hash(path.read_bytes()).hexdigest() != header.fingerprint:
            problem = "it was changed after it was written"
            path.with_suffix(".json").unlink(missing_ok=True)  # nobody else may take it for whole
        else:
            return header
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        problem = f"header: {error}"
    if verify:
        logger.warning(f"token file {path} is damaged ({problem}): making it again")
    return None


def _encode_piece(
    source: TextSource,
    piece: int,
    tokenizer: Tokenizer,
    bos_id: int | None,
    eos_id: int | None,
    dtype: str,
    path: Path,
) -> None:
    """Write the ids of one piece of text, and what to count of it, to ``path``."""
    limit = required_vocab_size(tokenizer, bos_id, eos_id)
    chunks: list[npt.NDArray[Any]] = []
    segments: list[tuple[str, bool, bool]] = []
    documents = skipped = text_bytes = waiting = 0
    first_skipped = ""

    def encode() -> None:
        flat: list[int] = []
        encoded = tokenizer.encode_batch([text for text, _, _ in segments])
        for (_, opens, closes), ids in zip(segments, encoded, strict=True):
            if opens and bos_id is not None:
                flat.append(bos_id)
            flat.extend(ids)
            if closes and eos_id is not None:
                flat.append(eos_id)
        if not all(0 <= edge < limit for edge in (min(flat, default=0), max(flat, default=0))):
            raise ValueError(f"tokenizer {tokenizer.name} gave an id outside its {tokenizer.vocab_size}")
        chunks.append(np.array(flat, dtype=dtype))
        segments.clear()

    for found in source.read(piece):
        if isinstance(found, Skipped):
            first_skipped = first_skipped or str(found)
            skipped += 1
            continue
        passage = Passage(found, True, True) if isinstance(found, str) else found
        documents += passage.opens
        text_bytes += len(passage.text.encode())
        for segment in _segments(passage):
            segments.append(segment)
            waiting += len(segment[0])
            if waiting >= _BATCH_CHARACTERS:
                encode()
                waiting = 0
    encode()
    with open(path, "wb") as file:
        np.savez(
            file,
            ids=np.concatenate(chunks),
            counts=np.array([documents, skipped, text_bytes]),
            first_skipped=np.array(first_skipped),
        )


def _segments(passage: Passage) -> Iterator[tuple[str, bool, bool]]:
    """Text, opens, closes of parts of a passage: small enough for memory and many enough for all cores.

    Cut at an end of a line (``PLACES_TO_CUT``); where there is none, anywhere.
    """
    text, start = passage.text, 0
    while len(text) - start > 2 * _SEGMENT_CHARACTERS:
        stop = start + _SEGMENT_CHARACTERS
        places = (pattern.search(text, stop, stop + _SEGMENT_CHARACTERS) for pattern in _PLACES_TO_CUT)
        place = next(filter(None, places), None)
        stop = place.end() if place else stop
        yield text[start:stop], passage.opens and start == 0, False
        start = stop
    yield text[start:], passage.opens and start == 0, passage.closes


def _assemble(parts: list[Path], path: Path, dtype: str, made_from: dict[str, Any]) -> None:
    """Write the token file at ``path`` and then, as the sign that it is whole, its header."""
    counts = np.zeros(3, dtype=np.int64)
    first_skipped, tokens, hasher = "", 0, _hash()
    unfinished = path.with_suffix(".part")
    with open(unfinished, "wb") as file:
        for part in parts:
            with np.load(part) as content:
                ids = content["ids"].astype(np.dtype(dtype).newbyteorder("<"))
                counts += content["counts"]
                first_skipped = first_skipped or str(content["first_skipped"])
            tokens += ids.size
            hasher.update(ids.data)
            file.write(ids.data)
        # The header must not reach the disk before what it vouches for.
        file.flush()
        os.fsync(file.fileno())
    documents, skipped, text_bytes = counts.tolist()
    if tokens == 0:
        unfinished.unlink()
        lost = f"; {skipped} bad records were skipped, the first: {first_skipped}" if skipped else ""
        raise ConfigError("training.dataset_path", f"the data set is empty: no token in {documents} documents{lost}")
    header = TokenHeader(
        format=_FORMAT,
        dtype=dtype,
        tokens=tokens,
        documents=documents,
        skipped=skipped,
        first_skipped=first_skipped,
        text_bytes=text_bytes,
        fingerprint=hasher.hexdigest(),
        made_from=made_from,
    )
    path.with_suffix(".json").unlink(missing_ok=True)
    unfinished.rename(path)
    unfinished.write_text(json.dumps(asdict(header), indent=2) + "\n")
    unfinished.rename(path.with_suffix(".json"))
