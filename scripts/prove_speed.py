"""Proves what is said of speed and memory: python scripts/prove_speed.py [PARTS ...]

Needs the test dependencies and about half an hour on two cores. Prints a table a part and ends with 1 if anything is
wrong. The tests run a short form of each.

  passes      compiling × activation checkpointing in one process and in layouts, against plain passes
  recompiles  graphs made in 50 steps, with a last batch that is not full, and rounds of validation
  loss        head and loss in chunks against all logits at once: memory in processes of their own, time in turn
  float8      the debug model trained in float8 and MXFP8, by each recipe, against bfloat16
  kept        what a forward pass leaves in memory for the backward pass, by mode
  optimizers  what AdamW keeps in 32 and in 8 bits a number, and the loss after 200 steps on real text
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.kept_memory import MODES as KEPT
from tests.distributed.kept_memory import build, kept_bytes
from tests.distributed.recompiles import CASES, run_steps
from tests.equivalence.layouts import base_argv, largest_difference
from tests.equivalence.passes import CELLS, LAYOUTS, equal_to_the_bit, run_cells
from tests.launch import RanksFailed, run_ranks
from tests.loss import head_cost
from tests.optim.state_cost import cost
from tests.transforms.float8_training import RECIPES, final_loss
from torchtitan.log import logger


def passes(folder: Path, options: argparse.Namespace) -> int:
    """Largest difference of loss, norm and gradients; without a compiler there must be none."""
    wrong, base = 0, base_argv(folder)
    for layout in LAYOUTS:
        # Cells of one layout in processes of their own, that one that fails takes no other with it.
        plain = run_ranks(run_cells, layout.ranks, base, layout, CELLS[:1], timeout=600)[0][0].record
        for cell in CELLS:
            if cell.mode == "memory budget" and "tp" in layout.keys:
                continue  # refused
            try:
                got = run_ranks(run_cells, layout.ranks, base, layout, [cell], timeout=600)[0][0]
            except RanksFailed as error:
                wrong += 1
                print(f"{layout.name:12s} {cell!s:24s} FAILED: {str(error).strip().splitlines()[-1]}", flush=True)
                continue
            largest = max(largest_difference(got.record, plain).values())
            same = equal_to_the_bit(got.record, plain)
            good = largest <= 1e-5 if cell.backend else same
            wrong += not good
            figure = "to the bit" if same else f"{largest:.1e}"
            print(
                f"{layout.name:12s} {cell!s:24s} {figure:>10s} {got.graphs:3d} graphs {got.seconds:6.1f} s of a ",
                end="",
            )
            print(f"processor{'' if good else '  WRONG'}", flush=True)
    return wrong


def recompiles(folder: Path, options: argparse.Namespace) -> int:
    """Rows of 7 in batches of 4, five of validation in batches of 2 and of another length."""
    wrong = 0
    for case, words in CASES.items():
        (place := folder / case.replace(" ", "-")).mkdir()
        ranks = 1 if case == "one process" else 2
        found = run_ranks(run_steps, ranks, place, words, 50, "inductor", timeout=900)
        again = sum(rank.again for rank in found)
        wrong += again > 0
        print(
            f"{case:12s} {found[0].steps} steps, {found[0].rounds} rounds of validation: graphs of each rank ", end=""
        )
        print(f"{', '.join(str(rank.graphs) for rank in found)}; made again {again}", flush=True)
    return wrong


def kept(folder: Path, options: argparse.Namespace) -> int:
    """Of a model of 8 layers, relative to what plain passes leave."""
    found = {name: kept_bytes(build(keys)) for name, keys in KEPT.items()}
    for name, count in found.items():
        print(f"{name:12s} {count / 2**20:7.2f} MiB {count / found['none']:6.3f}")
    return int(found["full"] > found["none"] / 4) + int(list(found.values()) != sorted(found.values(), reverse=True))


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


def float8(folder: Path, options: argparse.Namespace) -> int:
    """On the text that comes with Python, emulated; the loss is the mean of the last ten steps."""
    wrong, found = 0, {}
    print(f"| precision | loss after {options.steps} steps | of bfloat16's |\n| --- | --- | --- |", flush=True)
    for dtype, recipe in [("bfloat16", None), *((options.dtype, recipe) for recipe in (None, *RECIPES))]:
        if (dtype, recipe) in found:
            continue
        place = folder / dtype / str(recipe)
        found[dtype, recipe] = run_ranks(final_loss, 1, place, dtype, recipe, options.steps, timeout=7200)[0]
        ratio = found[dtype, recipe] / found["bfloat16", None]
        wrong += abs(ratio - 1) > 0.02
        name = dtype if recipe is None else f"{recipe}, the rest in {dtype}"
        print(f"| {name} | {found[dtype, recipe]:.4f} | {ratio:.4f} |", flush=True)
    return wrong


def optimizers(folder: Path, options: argparse.Namespace) -> int:
    """The debug model; losses are to be within a hundredth of AdamW's with states as long as the weights."""
    compiled = ["--optimizer.implementation=compiled"]
    cases = {
        "AdamW": [],
        "AdamW8bit": compiled,
        "AdamWFp8": compiled,
        "AdamW8bit in blocks of 256": [*compiled, "--optimizer.block_size=256"],
    }
    cases |= {f"{name}, bfloat16 weights": [*words, "--training.dtype=bfloat16"] for name, words in cases.items()}
    print("| optimizer | bytes a parameter | loss | to AdamW's | seconds an update |\n| --- | --- | --- | --- | --- |")
    wrong, base = 0, 0.0
    for number, (name, words) in enumerate(cases.items()):
        optimizer = f"--optimizer.name={name.partition(',')[0].partition(' ')[0]}"
        found = run_ranks(cost, 1, folder / str(number), [optimizer, *words], options.steps, timeout=3600)[0]
        base = found.loss if optimizer.endswith("=AdamW") else base
        off = found.loss / base - 1
        wrong += abs(off) > 0.01
        print(f"| {name} | {found.bytes:.3f} | {found.loss:.4f} | {off:+.2%} | {found.seconds:.3f} |", flush=True)
    return wrong


PARTS = {part.__name__: part for part in (passes, recompiles, kept, float8, loss, optimizers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--tokens", type=int, default=4096, help="of the part loss (default: %(default)s)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32], help="of the part loss")
    parser.add_argument("--repeats", type=int, default=5, help="of each side of a ratio (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=200, help="of runs of the parts float8 and optimizers (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the part float8: of all that is not in float8; many CPUs are slow in bfloat16 (default: %(default)s)",
    )
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
