"""Holds checkpoints against what is said of them: python scripts/prove_checkpoints.py [PARTS ...]

Parts: pairs (each layout saved, each goes on). Without PARTS all of them, in that order. Needs the test dependencies,
two cores, and 2 GB of disk below TMPDIR. Ends with 1 if anything is not as it should be.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.checkpoint.pairs import LAYOUTS, Proof, largest, pairs_of, special_pairs, table
from tests.equivalence.layouts import Model


def pairs(folder: Path, options: argparse.Namespace) -> int:
    """Every layout is saved and goes on in every other one."""
    proof, wrong = Proof(folder, timeout=1800), 0
    for words, model in (("untied", Model()), ("tied", Model(tied=True))):
        verdicts = proof.verdicts(pairs_of(LAYOUTS, model))
        wrong += sum(not verdict.good for verdict in verdicts)
        exact = sum(verdict.exact is True for verdict in verdicts)
        print(f"{words}: largest deviation of loss and relative norm; rows were saved, columns went on; = to the bit")
        print(table(verdicts))
        print(f"{len(verdicts)} pairs, largest {largest(verdicts):.1e}, {exact} of {len(LAYOUTS)} same ones to the bit")
    for verdict in proof.verdicts(special_pairs()):
        wrong += not verdict.good
        words = "on purpose, must differ: " if verdict.pair.differs else ""
        exact = {None: "", True: ", to the bit", False: ", NOT TO THE BIT"}[verdict.exact]
        print(
            f"{words}{verdict.pair.name}: loss {verdict.loss:.1e}, norm {verdict.norm:.1e}{exact}"
            f"{'' if verdict.good else '  WRONG'}"
        )
    return wrong


PARTS = {part.__name__: part for part in (pairs,)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)}; default: all")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    wrong = 0
    for name in options.parts or PARTS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            found = PARTS[name](Path(folder), options)
        print(f"{name}: {found} wrong, {time.perf_counter() - start:.0f} s\n", flush=True)
        wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
