"""A piece of text becomes ids: in batches for the tokenizer, long documents in parts, BOS and EOS around each document.

Which pieces there are is the source's; where the ids of all pieces go, the business of who asks for them.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.datasets import Passage, Skipped, TextSource
from torchtitan.data.files import PLACES_TO_CUT
from torchtitan.data.sharing import UnreadableError
from torchtitan.data.tokenizer import DescribedTokenizer, Tokenizer, required_vocab_size
from torchtitan.data.tokens.datatrove import id_dtype
from torchtitan.errors import one_line

_SEGMENT_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 21
_PLACES_TO_CUT = [re.compile(pattern) for pattern in PLACES_TO_CUT]


@dataclass(frozen=True)
class Encoding:
    """What turns text into ids; ``bos_id`` and ``eos_id`` stand around each document where they are not None."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None

    def around(self, ids: Sequence[int], *, opens: bool, closes: bool) -> tuple[list[int], list[int]]:
        """What stands before and after ``ids`` of a document, or of a part of one that opens or closes it.

        A text in which special tokens are parsed may spell BOS or EOS where they belong; they do not come twice.
        """
        return self._once(opens, self.bos_id, ids[:1]), self._once(closes, self.eos_id, ids[-1:])

    def _once(self, wanted: bool, edge: int | None, there: Sequence[int]) -> list[int]:
        if not wanted or edge is None:
            return []
        known = self.tokenizer if edge in there and isinstance(self.tokenizer, DescribedTokenizer) else None
        return [] if known and edge in known.special_tokens.values() else [edge]

    @property
    def limit(self) -> int:
        """All ids are below it."""
        return required_vocab_size(self.tokenizer, self.bos_id, self.eos_id)

    @property
    def dtype(self) -> str:
        """What ids are stored as."""
        return id_dtype(self.limit)

    def facts(self) -> dict[str, Any]:
        """Equal only where the same text gives the same ids."""
        return {"tokenizer": self.tokenizer.fingerprint, "bos_id": self.bos_id, "eos_id": self.eos_id}


@dataclass(frozen=True)
class Piece:
    """Ids of a piece of text, ``[tokens]``; how many of them there are up to the end of each document that ends here,
    int64 ``[documents]``; and what to count."""

    ids: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    skipped: int
    text_bytes: int
    first_skipped: str

    def write(self, path: Path) -> None:
        with open(path, "wb") as file:
            np.savez(
                file,
                ids=self.ids,
                ends=self.ends,
                counts=np.array([self.skipped, self.text_bytes]),
                first_skipped=np.array(self.first_skipped),
            )

    @staticmethod
    def read(path: Path) -> Piece:
        """What ``write`` wrote; UnreadableError where it is not that, as the archive's checksums tell."""
        try:
            with np.load(path) as content:
                skipped, text_bytes = content["counts"].tolist()
                return Piece(content["ids"], content["ends"], skipped, text_bytes, str(content["first_skipped"]))
        except (zipfile.BadZipFile, EOFError, ValueError, KeyError, NotImplementedError) as error:
            raise UnreadableError(path, one_line(error)) from None


def encode_piece(source: TextSource, piece: int, encoding: Encoding) -> Piece:
    """The ids of one piece of a source."""
    return encode_documents(source.read(piece), encoding)


def encode_documents(documents: Iterable[str | Passage | Skipped], encoding: Encoding) -> Piece:
    """The ids of documents in order."""
    tokenizer, limit = encoding.tokenizer, encoding.limit
    chunks: list[npt.NDArray[Any]] = []
    ends: list[int] = []
    segments: list[tuple[str, bool, bool]] = []
    tokens = skipped = text_bytes = waiting = 0
    first_skipped = ""

    def encode() -> None:
        nonlocal tokens
        flat: list[int] = []
        encoded = encode_segments(tokenizer, [(text, opens) for text, opens, _ in segments])
        for (_, opens, closes), ids in zip(segments, encoded, strict=True):
            before, after = encoding.around(ids, opens=opens, closes=closes)
            flat += before
            flat += ids
            flat += after
            if closes:
                ends.append(tokens + len(flat))
        if not all(0 <= edge < limit for edge in (min(flat, default=0), max(flat, default=0))):
            raise ValueError(f"tokenizer {tokenizer.name} gave an id outside its {tokenizer.vocab_size}")
        chunks.append(np.array(flat, dtype=encoding.dtype))
        tokens += len(flat)
        segments.clear()

    for found in documents:
        if isinstance(found, Skipped):
            first_skipped = first_skipped or str(found)
            skipped += 1
            continue
        passage = Passage(found, True, True) if isinstance(found, str) else found
        text_bytes += len(passage.text.encode())
        for segment in segments_of(passage):
            segments.append(segment)
            waiting += len(segment[0])
            if waiting >= _BATCH_CHARACTERS:
                encode()
                waiting = 0
    encode()
    return Piece(np.concatenate(chunks), np.array(ends, np.int64), skipped, text_bytes, first_skipped)


def encode_segments(tokenizer: Tokenizer, segments: Sequence[tuple[str, bool]]) -> list[list[int]]:
    """Ids of texts, each of which opens a document or goes on with one.

    What goes on is encoded behind a newline, after which text is cut, and the newline's ids are taken away: some
    tokenizers put a space before a text (sentencepiece's dummy prefix), which belongs before a document alone.
    """
    [newline] = tokenizer.encode_batch(["\n"])
    found = tokenizer.encode_batch([text if opens else "\n" + text for text, opens in segments])
    for n, (text, opens) in enumerate(segments):
        if opens:
            continue
        if found[n][: len(newline)] == newline:
            del found[n][: len(newline)]
        else:  # it begins with what forms a token with the newline
            [found[n]] = tokenizer.encode_batch([text])
    return found


def segments_of(passage: Passage) -> Iterator[tuple[str, bool, bool]]:
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
