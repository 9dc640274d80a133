"""Holds checkpoints against what is said of them: python scripts/prove_checkpoints.py [PARTS ...]

Parts: pairs (each layout is saved and goes on in each), kills (at random, and the restarts), faults (disks that fail,
files that rot, kills at everything a save does), beside (what a save costs training). Without PARTS all of them, in
that order. Needs the test dependencies, two cores that do nothing else, and 4 GB of disk below TMPDIR. Ends with 1 if
anything is not as it should be.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.checkpoint.kills import MODES, Way, chains, launched, uninterrupted
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
        print(table(verdicts), flush=True)
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


def kills(folder: Path, options: argparse.Namespace) -> int:
    """Runs are killed at random and started again; what comes of them is what comes of one that nobody kills."""
    draw, wrong, steps = random.Random(options.seed), 0, 60
    references = {ranks: uninterrupted(folder, ranks, steps) for ranks in (1, 2)}
    half = options.kills // 2
    ways = [(Way(mode, ranks), half) for mode in MODES for ranks in (1, 2)]
    ways += [(Way(mode, 2, launched), max(1, options.kills // 8)) for mode in MODES]
    title = f"killed with SIGKILL, started again (seed {options.seed})"
    print(f"{title:48s} {'runs':>5s} {'kills':>6s} in a save", flush=True)
    for way, number in ways:
        done = chains(folder, way, references[way.ranks], number, steps, draw)
        problems = [problem for chain in done for problem in chain.problems]
        killed, inside = sum(chain.kills for chain in done), sum(chain.inside for chain in done)
        if way.start is not launched and inside < killed / 2:
            problems.append("fewer than half of the kills fell into a save")
        said = "; ".join(problems) or "as if never killed"
        print(f"{way.name:48s} {len(done):5d} {killed:6d} {inside:9d}  {said}", flush=True)
        wrong += bool(problems)
    return wrong


PARTS = {part.__name__: part for part in (pairs, kills)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--kills", type=int, default=30, help="kills of each mode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what comes at random (default: %(default)s)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = work  # also of the processes that outlive a part
        for name in options.parts or PARTS:
            start, folder = time.perf_counter(), Path(work) / name
            folder.mkdir()
            found = PARTS[name](folder, options)
            shutil.rmtree(folder)
            print(f"{name}: {found} wrong, {time.perf_counter() - start:.0f} s\n", flush=True)
            wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
