"""Largest difference of loss and gradient norm between two runs: python scripts/compare_runs.py A B

Compares the steps that both logged; ends with 1 if there is none. In float32 two layouts agree to about 1e-6, as
docs/numerics.md tells.
"""

import argparse
import json
import sys
from pathlib import Path


def logged(run: Path) -> dict[int, dict[str, float]]:
    file = run / "metrics.jsonl"
    if not file.is_file():
        sys.exit(f"{run} is no folder of a run: it has no metrics.jsonl")
    return {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}


def main(one: Path, other: Path) -> None:
    a, b = logged(one), logged(other)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        sys.exit(f"{one} and {other} logged no step in common")
    print(
        f"{'step':>5}  {'loss ' + one.name:>14}  {'loss ' + other.name:>14}  {'difference':>10}  {'of grad_norm':>12}"
    )
    largest = {"loss": 0.0, "grad_norm": 0.0}
    for step in steps:
        differences = {key: abs(a[step][key] - b[step][key]) for key in largest}
        largest = {key: max(largest[key], differences[key]) for key in largest}
        print(
            f"{step:5d}  {a[step]['loss']:14.8f}  {b[step]['loss']:14.8f}"
            f"  {differences['loss']:10.1e}  {differences['grad_norm']:12.1e}"
        )
    print(f"{len(steps)} steps: loss within {largest['loss']:.1e}, grad_norm within {largest['grad_norm']:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folder of a run")
    main(*parser.parse_args().runs)
