"""``prepare`` against the bare tokenizer library on one thread: ``python -m tests.data.prepare_speed [MB]``.

Not a test: what a machine can do is not the code's to say. scripts/prove_data.py may call ``measure``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torchtitan
from torchtitan.data.tokenizers.hugging_face import build_hf_tokenizer

_LIBRARY = """
import json, sys, time
import tokenizers
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
library = tokenizers.Tokenizer.from_file(sys.argv[2])
started, tokens = time.perf_counter(), 0
for first in range(0, len(texts), 256):
    tokens += sum(len(e.ids) for e in library.encode_batch_fast(texts[first : first + 256], add_special_tokens=False))
print(tokens / (time.perf_counter() - started))
"""


def measure(corpus: Path, workers: int) -> float:
    """Tokens/s of ``prepare`` on a file of JSON lines, from the start of the command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchtitan.data", "prepare", f"{folder}/x", f"--workers={workers}"]
        source = ["--training.dataset=jsonl", f"--training.dataset_path={corpus}", "--data.no_add_bos"]
        started = time.perf_counter()
        subprocess.run([*command, *source], check=True, capture_output=True)
        return Path(f"{folder}/x.ds").stat().st_size / 2 / (time.perf_counter() - started)


def library_alone(corpus: Path) -> float:
    """Tokens/s of the library on one thread."""
    tokenizer = Path(torchtitan.__file__).parent / "assets/debug_tokenizer/tokenizer.json"
    alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    words = [sys.executable, "-c", _LIBRARY, str(corpus), str(tokenizer)]
    return float(subprocess.run(words, check=True, capture_output=True, env={**os.environ, **alone}).stdout)


def write_corpus(path: Path, megabytes: int) -> None:
    """Text of the running Python, a file of it a line, as often as it takes."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [json.dumps({"text": module.read_text(errors="replace")}) + "\n" for module in modules]
    with open(path, "w") as file:
        while file.tell() < megabytes << 20:
            file.writelines(texts)


if __name__ == "__main__":
    assert build_hf_tokenizer("").vocab_size < 1 << 16  # two bytes an id, as measure() counts
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        write_corpus(corpus, int(sys.argv[1]) if len(sys.argv) > 1 else 32)
        bare = library_alone(corpus)
        print(f"library on one thread: {bare:,.0f} tokens/s")
        for workers in (1, 2):
            found = measure(corpus, workers)
            share = found / bare / min(workers, os.cpu_count() or 1)
            print(f"prepare, {workers} worker(s): {found:,.0f} tokens/s, {share:.2f} of the library's a core")
