"""Train the small tokenizer of the debug model from the text that Python carries (the dataset python_docs).

    python scripts/train_debug_tokenizer.py [FOLDER]

Writes tokenizer.json and tokenizer_config.json to FOLDER, by default where the package keeps its own. The
result depends on the Python and the tokenizers library it is run with, so the committed one is made rarely
and by hand; README.md beside it says with which.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan.data.python_docs import PythonDocs

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
# How Llama 3 splits text before it merges bytes: words, up to three digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def documents() -> Iterator[str]:
    source = PythonDocs()
    for piece in range(source.num_pieces):
        yield from source.read(piece)


def train(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of 2046 merges and bytes, with BOS and EOS behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def main() -> None:
    default = Path(__file__).resolve().parents[1] / "torchtitan" / "assets" / "debug_tokenizer"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="where to write (default: %(default)s)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train(documents()).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
