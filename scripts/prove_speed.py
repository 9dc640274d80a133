"""Measures what a run can be told for speed and memory: python scripts/prove_speed.py [PARTS ...]

loss     head and loss in chunks against all logits at once: peak memory in processes of their own, and the
         processor's time, in turn; ends with 1 if they cost more than a quarter of the memory, or 1.1 times the time

Needs the test dependencies; the loss takes four minutes and 5 GB. Ends with 1 if anything is not as it must be.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.loss import head_cost
from torchtitan.log import logger

MIB = 2**20


def loss(folder: Path, options: argparse.Namespace) -> int:
    """Of a vocabulary of 128,256 and 4,096 tokens of dimension 256, float32."""
    size = head_cost.Size(tokens=options.tokens, dim=256, ids=128_256)
    whole = head_cost.added_bytes(size, 1)
    print(f"{size.tokens} tokens of {size.dim}, {size.ids} ids, float32: all logits at once add {whole / MIB:,.0f} MiB")
    print("| chunks | MiB added | of all at once | seconds of the processor | all at once | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    wrong = 0
    for chunks in options.chunks:
        added = head_cost.added_bytes(size, chunks)
        alone, found = head_cost.seconds(size, chunks, options.repeats)
        figures = (
            f"{added / MIB:,.0f}",
            f"{added / whole:.2f}",
            f"{found:.2f}",
            f"{alone:.2f}",
            f"{found / alone:.2f}",
        )
        print(f"| {chunks} | " + " | ".join(figures) + " |", flush=True)
        wrong += added > whole / 4 or found > 1.1 * alone
    return wrong


PARTS = {part.__name__: part for part in (loss,)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--tokens", type=int, default=4096, help="of the part loss (default: %(default)s)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32], help="of the part loss")
    parser.add_argument("--repeats", type=int, default=5, help="of each side of a ratio (default: %(default)s)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    logger.setLevel("ERROR")
    wrong = 0
    with tempfile.TemporaryDirectory() as work:
        for name in options.parts or PARTS:
            start, folder = time.perf_counter(), Path(work) / name
            folder.mkdir()
            found = PARTS[name](folder, options)
            print(f"{name}: {found} wrong, {time.perf_counter() - start:.0f} s\n", flush=True)
            wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
