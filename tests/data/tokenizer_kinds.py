"""A small tokenizer of every kind, made where a test wants it.

What is asked of them is in the tests.
"""

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from torchtitan.data.tokenizer import TOKENIZERS, Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "It was the best of times, it was the worst of times.",
    "To be, or not to be, that is the question.",
]
RANK_LINES = [
    f"{base64.b64encode(token).decode()} {rank}"
    for rank, token in enumerate([*(bytes([b]) for b in range(256)), b"th", b"the", b" the", b"qu"])
]


def build(name: str, path: str | Path = "", **options: Any) -> Tokenizer:
    return TOKENIZERS.bind(name, options, key="tokenizer")(str(path))


@cache
def sentencepiece_model(**options: Any) -> bytes:
    """A model that gives every text back: bytes for what it lacks, spaces as they are."""
    options = {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    } | options
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 5),
        model_writer=model,
        vocab_size=320,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def unigram_json() -> dict[str, Any]:
    """A tokenizer.json whose model has its special tokens among its words, and finds them in text by itself."""
    letters = [(c, -5.0) for c in sorted({*"".join(TEXT), *"<|/>s"})]
    rust = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *letters], 0))
    rust.decoder = tokenizers.decoders.Fuse()
    rust.add_special_tokens(["<s>", "</s>"])
    return json.loads(rust.to_str())


def make(kind: str, folder: Path) -> Tokenizer:
    """One of KINDS, from files in ``folder``."""
    folder.mkdir(exist_ok=True)
    if kind == "hf":
        return build("hf")
    if kind == "unigram":
        (folder / "tokenizer.json").write_text(json.dumps(unigram_json()))
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        return build("hf", folder)
    if kind == "tiktoken":
        (folder / "tokenizer.model").write_text("\n".join(RANK_LINES) + "\n")
        return build("tiktoken", folder)
    if kind == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model())
        return build("sentencepiece", folder)
    return build("bytes")


KINDS = {
    "hf": ("<|begin_of_text|>", "<|end_of_text|>"),
    "unigram": ("<s>", "</s>"),
    "tiktoken": ("<|begin_of_text|>", "<|end_of_text|>"),
    "sentencepiece": ("<s>", "</s>"),
    "bytes": ("", ""),
}
"""How each spells its BOS and EOS."""
