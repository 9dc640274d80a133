"""What each setting gives on this machine: python scripts/benchmark.py [GRID ...]

Every row is a run of its own, started as users start one. Rows take turns, round after round, so that a machine that
slows down slows all of them; of a row the table has the median over all steps of all rounds, the first three of a run
apart. Beside it stands what its bare kernels need (bare_kernels.py), each alone; the limit ratio is the step's seconds
by their sum. Prints the table, and saves it as benchmark.md and, with all that was measured, as benchmark.json.

A row that this machine or this version refuses is named with the reason.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark_runs import GRIDS, SHAPES, Measured, NotRun, Row, bare_kernels, run, run_peer

COLUMNS = ("tps", "step s", "spread", "peak GiB", "MFU", "limit ratio", "products s", "attention s", "optimizer s")
COLUMNS += ("rest s", "start s", "data")


def figures(row: Row, measured: Measured, kernels: dict[str, Any] | None) -> dict[str, Any]:
    """The numbers of a row; those of its kernels are missing where they were not measured."""
    steps = sorted(step for steps in measured.step_seconds for step in steps)
    shape, median = SHAPES[row.shape], statistics.median(steps)
    quarters = statistics.quantiles(steps, n=4) if len(steps) > 1 else [median] * 3
    tps = shape.batch * shape.seq_len / median
    found = {
        "tps": tps,
        "step_seconds": median,
        "spread_percent": 100 * (quarters[2] - quarters[0]) / median,
        "peak_gib": statistics.median(measured.peak_gib),
        "startup_seconds": statistics.median(measured.startup_seconds),
        "data_percent": statistics.median(measured.data_percent) if measured.data_percent else None,
    }
    if kernels is not None:
        parts = {name: kernels[f"{name}_seconds"] for name in ("products", "attention", "optimizer")}
        found |= {f"{name}_seconds": seconds for name, seconds in parts.items()}
        found |= {"limit_ratio": median / sum(parts.values()), "rest_seconds": median - sum(parts.values())}
        if kernels["peak_flops"]:
            found["mfu_percent"] = 100 * kernels["flops_per_token"] * tps / kernels["peak_flops"]
    return found


def _cells(found: dict[str, Any]) -> list[str]:
    def cell(name: str, form: str) -> str:
        return "–" if found.get(name) is None else form.format(found[name])

    return [
        cell("tps", "{:,.0f}"),
        cell("step_seconds", "{:.4g}"),
        cell("spread_percent", "{:.1f} %"),
        cell("peak_gib", "{:.2f}"),
        cell("mfu_percent", "{:.1f} %"),
        cell("limit_ratio", "{:.2f}"),
        *(cell(f"{part}_seconds", "{:.3g}") for part in ("products", "attention", "optimizer", "rest")),
        cell("startup_seconds", "{:.1f}"),
        cell("data_percent", "{:.2f} %"),
    ]


def table(results: dict[Row, dict[str, Any]]) -> list[str]:
    """Markdown: a line a row."""
    lines = [f"| row | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    return lines + [f"| {row} | {' | '.join(_cells(found))} |" for row, found in results.items()]


def ratios(results: dict[Row, dict[str, Any]], rounds: dict[Row, Measured]) -> list[str]:
    """Markdown: each row by its twin in TorchTitan, the median of the rounds' ratios and their range."""
    lines = ["| row by TorchTitan | tps | of rounds | peak memory | start |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in results:
        twin = dataclasses.replace(row, peer=True)
        if row.peer or twin not in results:
            continue
        pairs = zip(rounds[row].step_seconds, rounds[twin].step_seconds, strict=False)
        faster = sorted(statistics.median(theirs) / statistics.median(ours) for ours, theirs in pairs)
        others = [results[row][name] / results[twin][name] for name in ("peak_gib", "startup_seconds")]
        said = f"{statistics.median(faster):.3f} | {faster[0]:.3f} to {faster[-1]:.3f}"
        lines.append(f"| {row} | {said} | {others[0]:.3f} | {others[1]:.3f} |")
    return lines if len(lines) > 2 else []


def measure(options: argparse.Namespace, rows: Sequence[Row], folder: Path) -> tuple[dict[Row, Any], ...]:
    """Rounds of every row, the kernels of every floor, and why rows are missing."""
    rounds: dict[Row, Measured] = {row: Measured() for row in rows}
    kernels: dict[Row, Any] = {}
    missing: dict[Row, str] = {}
    deadline = time.monotonic() + 60 * options.minutes
    for number in range(options.rounds):
        for row in rows:
            place = folder / f"{len(list(folder.iterdir()))}"
            if row in missing or (number and time.monotonic() > deadline):
                continue
            if time.monotonic() > deadline:
                missing[row] = f"{options.minutes:g} minutes were over"
                continue
            try:
                if row.peer:
                    run_peer(row, place, rounds[row], steps=options.steps, program=options.beside)
                else:
                    run(row, place, rounds[row], steps=options.steps, log_freq=options.log_freq)
            except NotRun as error:
                missing[row] = str(error)
                continue
            finally:
                if row in missing:
                    print(f"not run: {row}: {missing[row]}", flush=True)
            newest = statistics.median(rounds[row].step_seconds[-1])
            print(f"round {number + 1} of {options.rounds}: {row}: {newest:.4g} s a step", flush=True)
            floor = row.floor()
            # The bare kernels of float8 are not those of bfloat16, and differ by recipe.
            if row.peer or floor in kernels or row.precision.startswith("float8"):
                continue
            try:
                kernels[floor] = bare_kernels(floor, folder / "kernels")
            except NotRun as error:
                kernels[floor] = None
                print(f"no bare kernels of {floor}: {error}", flush=True)
    return rounds, kernels, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*", metavar="GRID", help=f"of {', '.join(GRIDS)}; default: debug")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of a run (default: %(default)s)")
    parser.add_argument("--log-freq", type=int, default=1, help="steps that are timed together (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=600, help="after which nothing is begun any more")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--save", type=Path, default=Path("runs/benchmark"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--beside",
        nargs=2,
        metavar=("PYTHON", "SCRIPT"),
        help="of TorchTitan 0.2.2: an interpreter that has it, and a script that starts it on this machine; its runs "
        "take turns with ours, and there is a table of ratios",
    )
    options = parser.parse_args()
    if unknown := [name for name in options.grids if name not in GRIDS]:
        parser.error(f"no grid {unknown[0]!r}; there are {', '.join(GRIDS)}")
    chosen = dict.fromkeys(
        row for name in options.grids or ["debug"] for row in GRIDS[name] if options.only in str(row)
    )
    if not chosen:
        parser.error(f"no row of {', '.join(options.grids or ['debug'])} has {options.only!r} in its name")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    rows = []
    for row in chosen:
        rows.append(row)
        if options.beside and row.checkpointing == "none" and row.chunks == 1 and SHAPES[row.shape].peer:
            rows.append(dataclasses.replace(row, peer=True))
    options.save.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the run of a row ends with it
    with tempfile.TemporaryDirectory() as work:
        rounds, kernels, missing = measure(options, rows, Path(work))
    results = {
        row: figures(row, rounds[row], None if row.peer else kernels.get(row.floor()))
        for row in rows
        if rounds[row].step_seconds
    }
    about = next((found for found in kernels.values() if found), {})
    lines = table(results)
    if compared := ratios(results, rounds):
        lines += ["", *compared]
    if about:
        peaks = {row.precision: found["peak_flops"] for row, found in kernels.items() if found and found["peak_flops"]}
        told = ", ".join(f"{peak / 1e12:.4g} TFLOP/s in {name}" for name, peak in peaks.items())
        lines += ["", f"{about['device']}, {about['threads']} threads, torch {about['torch']}; peak {told};"]
        lines += [f"the loader alone gives {about['loader_tokens_per_second']:,.0f} tokens/s."]
    lines += [f"\nNot run: {row}: {reason}" for row, reason in missing.items()]
    print("\n" + "\n".join(lines))
    (options.save / "benchmark.md").write_text("\n".join(lines) + "\n")
    everything = {
        "command": sys.argv,
        "rows": [
            {"name": str(row), **dataclasses.asdict(row), **found, "measured": dataclasses.asdict(rounds[row])}
            for row, found in results.items()
        ],
        "kernels": [{"name": str(row), **found} for row, found in kernels.items() if found],
        "missing": {str(row): reason for row, reason in missing.items()},
    }
    (options.save / "benchmark.json").write_text(json.dumps(everything, indent=1))
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
