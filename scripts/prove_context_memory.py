"""Measures what context parallelism keeps of a block on a rank: python scripts/prove_context_memory.py [SEQ_LEN]

Prints MiB at degrees 1, 2 and 4 (default 8,192 tokens, bfloat16), and ends with 1 if anything but the gathered keys and
values falls by less than the degree. Needs the test dependencies and a minute.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.context_memory import Usage, usage
from tests.launch import run_ranks

MIB = 2**20


def main(seq_len: int) -> int:
    print(f"{seq_len} tokens, bfloat16, dim 512, 8 heads of 64, 4 key-value heads; MiB on a rank")
    print("| degree | method | q, k, v | attention saves beside | gathered k and v | block saves, without those |")
    print("| --- | --- | --- | --- | --- | --- |")
    short = False
    alone: Usage | None = None
    for ranks in (1, 2, 4):
        of_ranks = run_ranks(usage, ranks, seq_len, torch.bfloat16, timeout=300)
        for method in of_ranks[0]:
            found = max((of_rank[method] for of_rank in of_ranks), key=lambda u: u.block)
            alone = alone or found
            figures = (found.inputs, found.attention, found.gathered, found.block)
            print(f"| {ranks} | {method} | " + " | ".join(f"{size / MIB:.2f}" for size in figures) + " |", flush=True)
            if method != "ulysses":  # which keeps what it exchanged beside what it made
                parts = ((found.attention, alone.attention), (found.block, alone.block), (found.inputs, alone.inputs))
                short |= any(size > 1.02 * whole / ranks for size, whole in parts)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8192))
