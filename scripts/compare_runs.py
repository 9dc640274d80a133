"""Largest difference of loss and gradient norm between two runs: python scripts/compare_runs.py A B

Compares the steps that both logged. What they should agree to is in docs/numerics.md.
"""

import json
import sys
from pathlib import Path


def logged(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def main(one: Path, other: Path) -> None:
    a, b = logged(one), logged(other)
    steps = sorted(a.keys() & b.keys())
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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
