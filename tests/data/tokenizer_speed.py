"""How fast tokenizers are beside their libraries alone. For the proof, not for a test: times differ on a busy machine.

What they must give is in tests/peers/test_tokenizers.py.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.data.tokenizer import TOKENIZERS, threads


def texts(shared: Path) -> list[str]:
    """About 2 MB: records of C4, and Shakespeare in parts."""
    records = (shared / "text/c4_mini_train.jsonl").read_text().splitlines()
    long = (shared / "text/tinyshakespeare.txt").read_text()
    return [json.loads(line)["text"] for line in records] + [long[n : n + 65536] for n in range(0, len(long), 65536)]


def library(kind: str, tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """What encodes texts by the library alone, with as many threads."""
    content = tokenizer.file.read_bytes()
    if kind == "hf":
        import tokenizers

        rust = tokenizers.Tokenizer.from_buffer(content)
        return lambda given: [e.ids for e in rust.encode_batch_fast(given, add_special_tokens=False)]
    if kind == "sentencepiece":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        return lambda given: processor.encode(given, num_threads=threads())
    import base64

    import tiktoken

    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    pattern = TOKENIZERS.options("tiktoken")["pattern"].default
    encoding = tiktoken.Encoding("alone", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda given: encoding.encode_ordinary_batch(given, num_threads=threads())


def speeds(shared: Path, rounds: int = 5) -> dict[str, tuple[float, float]]:
    """Kind → tokens a second of ours and of the library alone, each the best of ``rounds``, taken in turn."""
    given = texts(shared)
    folders = {"hf": "torchtune_hf", "tiktoken": "torchtune_tiktoken", "sentencepiece": "torchtune_sentencepiece"}
    found = {}
    for kind, folder in folders.items():
        ours = TOKENIZERS.bind(kind, {}, key="tokenizer")(str(shared / "tokenizers" / folder))
        ways = ours.encode_batch, library(kind, ours)
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for n, encode in enumerate(ways):
                started = time.perf_counter()
                ids = encode(given)
                best[n] = min(best[n], time.perf_counter() - started)
        tokens = sum(map(len, ids))
        found[kind] = tokens / best[0], tokens / best[1]
    return found


if __name__ == "__main__":
    for kind, (ours, alone) in speeds(Path(__file__).resolve().parents[3] / "shared").items():
        print(f"{kind:14} {ours:12,.0f} tokens/s, the library alone {alone:12,.0f}, ratio {ours / alone:.2f}")
