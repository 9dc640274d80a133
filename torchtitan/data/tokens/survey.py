"""What a tokenizer makes of a text, counted: how often each id, how fast, and whether the text comes back.

How that is shown does not belong here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchtitan.data.datasets import Passage, Skipped, TextSource
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.encode import encode_segments, segments_of

_BATCH_CHARACTERS = 1 << 21
_SHOWN_CHARACTERS = 20


@dataclass(frozen=True)
class Difference:
    """Where decoded ids first are another text; document, line and column count from 1."""

    document: int
    line: int
    column: int
    text: str
    decoded: str


@dataclass
class Survey:
    """Ids are those of the text alone: without the BOS and EOS that a configuration puts around a document."""

    counts: Counter[int] = field(default_factory=Counter)
    """How often each id came; of those only that did, for the largest may lie far above the others."""
    documents: int = 0
    text_bytes: int = 0
    characters: int = 0
    encode_seconds: float = 0.0
    difference: Difference | None = None
    skipped: int = 0
    first_skipped: str = ""
    ids: list[int] = field(default_factory=list)
    """As many as were asked for, from the first on."""

    @property
    def tokens(self) -> int:
        return self.counts.total()


def survey(
    source: TextSource, tokenizer: Tokenizer, *, keep: int = 0, seen: Callable[[int], object] = lambda pieces: None
) -> Survey:
    """Encode and decode all of ``source`` as training does, some MB at a time; keep the first ``keep`` ids.

    ``seen`` is told of each piece that is done. ConfigError for text that cannot be read.
    """
    found = Survey()
    place = _Place()
    segments: list[tuple[str, bool]] = []
    waiting = 0
    [newline] = tokenizer.encode_batch(["\n"])

    def decode(ids: list[int], opens: bool) -> str:
        # Some take a space from where a text begins, as they put one there.
        return tokenizer.decode(ids) if opens else tokenizer.decode([*newline, *ids]).removeprefix("\n")

    def encode() -> None:
        started = time.perf_counter()
        encoded = encode_segments(tokenizer, segments)
        found.encode_seconds += time.perf_counter() - started
        for (text, opens), ids in zip(segments, encoded, strict=True):
            found.counts.update(ids)
            found.ids += ids[: max(keep - len(found.ids), 0)]
            place.enter(opens)
            if found.difference is None and (decoded := decode(ids, opens)) != text:
                found.difference = place.difference(text, decoded)
            place.pass_by(text)
        segments.clear()
        if not all(0 <= token_id < tokenizer.vocab_size for token_id in found.counts):
            raise ValueError(f"tokenizer {tokenizer.name} gave an id outside its {tokenizer.vocab_size}")

    for piece in range(source.num_pieces):
        for passage in source.read(piece):
            if isinstance(passage, Skipped):
                found.first_skipped = found.first_skipped or str(passage)
                found.skipped += 1
                continue
            passage = Passage(passage, True, True) if isinstance(passage, str) else passage
            found.documents += passage.opens
            found.text_bytes += len(passage.text.encode())
            found.characters += len(passage.text)
            for text, opens, _ in segments_of(passage):
                segments.append((text, opens))
                waiting += len(text)
                if waiting >= _BATCH_CHARACTERS:
                    encode()
                    waiting = 0
        seen(1)
    encode()
    return found


def total(surveys: Sequence[Survey]) -> Survey:
    """All of them as one; where a text does not come back is said of each alone."""
    return Survey(
        sum((s.counts for s in surveys), Counter()),
        documents=sum(s.documents for s in surveys),
        text_bytes=sum(s.text_bytes for s in surveys),
        characters=sum(s.characters for s in surveys),
        encode_seconds=sum(s.encode_seconds for s in surveys),
        difference=next((s.difference for s in surveys if s.difference), None),
        skipped=sum(s.skipped for s in surveys),
        first_skipped=next((s.first_skipped for s in surveys if s.skipped), ""),
    )


class _Place:
    """Where in the text a segment stands."""

    document, line, column = 0, 1, 1

    def enter(self, opens: bool) -> None:
        if opens:
            self.document, self.line, self.column = self.document + 1, 1, 1

    def pass_by(self, text: str) -> None:
        newlines = text.count("\n")
        self.line += newlines
        self.column = len(text) - text.rfind("\n") if newlines else self.column + len(text)

    def difference(self, text: str, decoded: str) -> Difference:
        at = next((n for n, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), None)
        at = min(len(text), len(decoded)) if at is None else at
        there = _Place()
        there.line, there.column = self.line, self.column
        there.pass_by(text[:at])
        stop = at + _SHOWN_CHARACTERS
        return Difference(max(self.document, 1), there.line, there.column, text[at:stop], decoded[at:stop])
