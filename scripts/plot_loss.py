"""Draws the loss and the learning rate of a run: python scripts/plot_loss.py outputs docs/loss.png

Anything interactive is TensorBoard's.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def main(run: Path, picture: Path) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    x = [step["step"] for step in steps]
    figure, left = plt.subplots(figsize=(7, 3), dpi=120, layout="constrained")
    left.plot(x, [step["loss"] for step in steps], color="tab:blue", linewidth=1.2)
    left.set(xlabel="step", ylabel="loss", xlim=(1, x[-1]))
    left.grid(alpha=0.3)
    right = left.twinx()
    right.plot(x, [step["lr"] for step in steps], color="tab:gray", linewidth=1, linestyle="--")
    right.set(ylabel="learning rate", ylim=(0, None))
    figure.savefig(picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("picture", type=Path, help="file to write")
    options = parser.parse_args()
    main(options.run, options.picture)
