"""What memory-mapped tokens cost: ``python -m tests.data.token_speed [MB of tokens] [documents]``.

Not a test of speed, for what a machine can do is not the code's to say; ``test_token_speed.py`` has the part that is.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.datasets import DATASETS
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.tokens.datatrove import metadata_text
from torchtitan.data.tokens.megatron import IndexedWriter

VOCAB_SIZE = 50257
SEQ_LEN = 4096


@dataclass
class Cost:
    """Of doing something: seconds on the clock and of the processor, and memory that stands in no file, in MB."""

    seconds: float
    cpu_seconds: float
    anonymous_mb: float


def cost(do: Callable[[], Any]) -> Cost:
    """What ``do`` costs."""
    memory, cpu, clock = _anonymous_mb(), time.process_time(), time.perf_counter()
    do()
    return Cost(time.perf_counter() - clock, time.process_time() - cpu, _anonymous_mb() - memory)


def _anonymous_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1000


def opened(name: str, path: Path) -> Any:
    return DATASETS.bind(name, {}, key="data.args")(str(path), "raise").open(VOCAB_SIZE)


def write_tokens(path: Path, megabytes: int) -> None:
    """A ``.ds`` file of random ids."""
    random = np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(random.integers(0, VOCAB_SIZE, 500_000, dtype=np.uint16).tobytes())
    path.with_name(path.name + ".metadata").write_text(metadata_text("random", 2, 500_000 * megabytes))


def write_documents(folder: Path, documents: int) -> None:
    """``x.ds`` and ``x.bin`` of one length, whose tokens take no room, with as many documents."""
    writer = IndexedWriter(folder / "x", "<u2")
    lengths = np.random.default_rng(0).integers(1, 100, documents)
    for first in range(0, documents, 1 << 20):
        part = lengths[first : first + (1 << 20)]
        writer.add(np.zeros(part.sum(), np.uint16), np.cumsum(part))
    writer.finish()
    tokens = int(lengths.sum())
    np.cumsum(lengths).astype("<u8").tofile(folder / "x.ds.index")
    (folder / "x.ds.metadata").write_text(metadata_text("zeros", 2, tokens))
    with open(folder / "x.ds", "wb") as file:
        file.truncate(2 * tokens)


def sampling(path: Path, rows: int, *, times: int = 5) -> tuple[float, float, float]:
    """Tokens/s of shuffled rows from the file at ``path``, read before, the best and the median of ``times``; and MB of
    memory."""
    tokens = opened("nanoset", path)
    found = ConcatRows(tokens, seq_len=SEQ_LEN, shuffle=True, seed=0)
    path.read_bytes()  # what comes from a disk the first time is not the code's to say

    def run(first: int) -> None:
        for row in range(first, first + rows):
            found[row]

    run(0)
    costs = [cost(lambda k=k: run(k * rows)) for k in range(times)]  # type: ignore[misc]
    speeds = sorted(rows * SEQ_LEN / each.seconds for each in costs)
    return speeds[-1], speeds[len(speeds) // 2], sum(each.anonymous_mb for each in costs)


def start_late(path: Path) -> float:
    """Seconds from nothing to the first row of step 1,000,000 with 512 rows a step."""

    def start() -> None:
        ConcatRows(opened("nanoset", path), seq_len=SEQ_LEN, shuffle=True, seed=0)[512 * 1_000_000]

    return cost(start).seconds


if __name__ == "__main__":
    megabytes, documents = (int(word) for word in (sys.argv[1:] + ["1000", "10000000"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder / "r.ds", megabytes)
        best, median, memory = sampling(folder / "r.ds", 5_000, times=20)
        print(f"shuffled rows of {SEQ_LEN} from a warm file of {megabytes:,} MB: best {best / 1e6:,.0f}, ", end="")
        print(f"median {median / 1e6:,.0f} million tokens/s; {memory:+.1f} MB of anonymous memory")
        print(f"start at step 1,000,000: {start_late(folder / 'r.ds'):.3f} s")
        write_documents(folder, documents)
        for kind, file in (("nanoset", "x.ds"), ("megatron", "x")):
            found = cost(lambda kind=kind, file=file: opened(kind, folder / file))  # type: ignore[misc]
            print(f"{kind} with {documents:,} documents opened: {found}")
