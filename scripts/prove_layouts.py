"""Compares every layout with one process and prints the table: python scripts/prove_layouts.py [WORDS ...]

Needs the test dependencies and about ten minutes on two cores. Ends with 1 if a layout is out of tolerance, or if a
fault put in on purpose is not seen. WORDS choose the layouts whose names hold one of them.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.equivalence.layouts import FAULTS, Layout, Record, all_layouts, base_argv, largest_difference, run_all
from tests.launch import RanksFailed, run_ranks


def main(words: list[str]) -> int:
    start = time.perf_counter()
    failed = 0
    layouts = [layout for layout in all_layouts() if not words or any(word in layout.name for word in words)]
    if not layouts:
        print(
            f"none of {len(all_layouts())} layouts, such as {all_layouts()[0].name!r}, has any of {words} in its name"
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        base = base_argv(Path(folder))

        def run(layout: Layout, fault: str | None = None) -> Record:
            return run_ranks(run_all, layout.ranks, base, [layout], fault, timeout=300)[0][0]

        models = dict.fromkeys(layout.model for layout in (*layouts, *all_layouts()[:1]))
        references = {model: run(Layout({}, model)) for model in models}
        print(f"{'layout':68s} {'ranks':>5s} {'loss':>8s} {'norm':>8s} {'gradient':>8s} {'seconds':>7s}")
        for layout in layouts:
            expected = references[layout.model]
            try:
                got = run(layout)
            except RanksFailed as error:
                print(f"{layout.name:68s} {layout.ranks:5d} failed: {str(error).strip().splitlines()[-1]}")
                failed += 1
                continue
            difference = largest_difference(got, expected)
            same_start = all(torch.equal(got.initial[name], value) for name, value in expected.initial.items())
            same = same_start and not got.unequal
            good = same and all(difference[key] <= limit for key, limit in layout.model.tolerance.items())
            failed += not good
            figures = " ".join(f"{value:8.1e}" for value in difference.values())
            print(
                f"{layout.name:68s} {layout.ranks:5d} {figures} {got.seconds:7.1f}{'' if good else '  WRONG'}",
                flush=True,
            )
        for fault, name in FAULTS.items():
            (layout,) = [layout for layout in all_layouts() if layout.name == name]
            if layout not in layouts:
                continue
            difference = largest_difference(run(layout, fault), references[layout.model])
            seen = difference["gradient"] > 1e-3
            failed += not seen
            print(f"on purpose, {name}: {fault}: gradient {difference['gradient']:.1e}{'' if seen else '  NOT SEEN'}")
    print(f"{len(layouts)} layouts in {time.perf_counter() - start:.0f} s, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
