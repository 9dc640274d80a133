"""Models of sentencepiece, run by its library.

What they add around a text is not asked for: BOS and EOS are added to documents elsewhere (tokens/encode.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.tokenizer import KEY, TOKENIZERS, Tokenizer, threads
from torchtitan.data.tokenizer_files import SENTENCEPIECE, find_tokenizer_file, read_tokenizer_file
from torchtitan.errors import ConfigError


class SentencePieceTokenizer:
    """A model run by sentencepiece (C++, on all cores). No text becomes a control token, such as BOS and EOS."""

    def __init__(self, processor: Any, file: Path, *, fingerprint: str) -> None:
        self.name, self.file, self.fingerprint = str(file), file, fingerprint
        self.vocab_size = processor.vocab_size()
        self.bos_id, self.eos_id = (i if i >= 0 else None for i in (processor.bos_id(), processor.eos_id()))
        every = range(self.vocab_size)
        self.special_tokens = {processor.id_to_piece(i): i for i in every if processor.is_control(i)}
        self.unknown_ids = frozenset(i for i in every if processor.is_unknown(i) or processor.is_byte(i))
        self.absent: dict[str, str] = {}
        self._processor = processor

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, num_threads=threads(), add_bos=False, add_eos=False)

    def decode(self, ids: Sequence[int]) -> str:
        # Ids that the config added as BOS and EOS may lie above the model's own, and have no text.
        return self._processor.decode([i for i in ids if i < self.vocab_size])

    def token_id(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)  # that of the unknown token where there is none
        return found if self.token(found) == token else None

    def token(self, token_id: int) -> str | None:
        return self._processor.id_to_piece(token_id) if 0 <= token_id < self.vocab_size else None


@TOKENIZERS.register("sentencepiece")
def build_sentencepiece_tokenizer(path: str) -> Tokenizer:
    """sentencepiece: a ``.model``, or the folder with ``tokenizer.model``; BOS and EOS are the model's."""
    import sentencepiece

    file = find_tokenizer_file(path, SENTENCEPIECE)
    content = read_tokenizer_file(file)
    try:
        # Of nothing the library makes one without tokens. What it says itself names its own source files.
        processor = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError:
        processor = None
    if processor is None or processor.vocab_size() == 0:
        why = "it is empty" if not content else "it is another kind of file, or damaged"
        raise ConfigError(KEY, f"{file} is not a model of sentencepiece: {why}")
    return SentencePieceTokenizer(processor, file, fingerprint=hashlib.sha256(content).hexdigest())
