"""A run on a blend of three texts in three alphabets, so that each of its rows shows where it comes from."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tests.launch import run_ranks
from tests.runs import metrics, row_hashes, run_job, tiny_argv
from torchtitan.config import load_config
from torchtitan.data.batch import Batch
from torchtitan.feed import blended, open_rows
from torchtitan.resolve.job import resolve_job

WEIGHTS = {"letters": 0.7, "digits": 0.2, "signs": 0.1}
_ALPHABETS = {"letters": "abcdefgh ", "digits": "0123456789", "signs": "+-*/=()<>"}
_SEQ_LEN = 48


@dataclass(frozen=True)
class Found:
    """How many rows each source gave; the largest distance of any prefix of them from its shares, in rows; and how many
    rows were others than one process has, or steps at which the metrics told other counts."""

    counts: dict[str, int]
    largest: float
    wrong: int


def train(folder: Path, *overrides: str, seed: int = 0, timeout: float = 120) -> Found:
    """Train on two ranks, and look at every row that was trained on."""
    dice, tables = random.Random(seed), []
    for name, alphabet in _ALPHABETS.items():
        texts = ["".join(dice.choices(alphabet, k=dice.randint(50, 3000))) for _ in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        tables.append(
            f"{{dataset = 'jsonl', dataset_path = '{folder / name}.jsonl', weight = {WEIGHTS[name]}, name = '{name}'}}"
        )
    own = [word for word in tiny_argv(folder) if not word.startswith(("--training.dataset", "--training.seq_len"))]
    argv = [*own, f"--training.seq_len={_SEQ_LEN}", f"--data.sources=[{', '.join(tables)}]", *overrides]
    outcome = run_ranks(run_job, 2, argv, timeout=timeout)[0]
    job = resolve_job(load_config(argv), 1)
    rows, told = blended(job, open_rows(job), [0]), metrics(folder / "run")
    counts, largest, wrong, row = dict.fromkeys(WEIGHTS, 0), 0.0, 0, 0
    for step, hashes in enumerate(outcome.rows):
        for trained_on in hashes:
            batch = Batch(*(part[None] for part in rows[row]))
            wrong += row_hashes(batch) != [trained_on]
            counts[_source(batch)] += 1
            row += 1
            largest = max(largest, *(abs(counts[name] - weight * row) for name, weight in WEIGHTS.items()))
        wrong += any(told[step][f"source_tokens/{name}"] != _SEQ_LEN * count for name, count in counts.items())
    return Found(counts, largest, wrong)


def _source(batch: Batch) -> str:
    letters = {chr(token) for token in batch.tokens.flatten().tolist() if token < 256}
    (name,) = (name for name, alphabet in _ALPHABETS.items() if letters <= set(alphabet))
    return name
