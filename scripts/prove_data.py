"""Proves what is said of data: python scripts/prove_data.py [PARTS ...]

Needs the test dependencies and about twenty minutes on two cores. Prints a table a part and ends with 1 if anything
is wrong. The tests run a short form of each.

  orders   each kind of data gives the same rows on any number of ranks and workers, and after stops
  shares   blends: how far any prefix is from its weights, of 0.7, 0.2 and 0.1 and of a hundred drawn ones
  minutes  ten minutes (--minutes) of training on three sources: every prefix of its rows, and what its metrics say
  bad      what is said of bad data
  runs     twenty steps of the debug model on each kind
  speed    what memory-mapped tokens cost: sampling, a late start, an index of ten million documents
  prepare  `prepare` beside the tokenizer's library
"""

import argparse
import random
import re
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.data import prepare_speed, three_sources, token_files, token_speed
from tests.data.bad_input import TABLE, message
from tests.data.kinds import KINDS, job_on
from tests.data.orders import RANKS, WORKERS, order_of
from tests.launch import RanksFailed, run_ranks
from tests.runs import run_job
from torchtitan.config import ConfigError, describe_error, load_config
from torchtitan.data.rows.mixture import Split
from torchtitan.log import logger


def orders(folder: Path, options: argparse.Namespace) -> int:
    """Hashes of 30 global batches of 10 rows, more than an epoch, and three runs that stopped twice."""
    wrong = 0
    columns = [f"{ranks} × {workers}" for ranks in RANKS for workers in WORKERS]
    print(f"{'ranks × workers':24s} {' '.join(f'{column:>12s}' for column in columns)}  rows an epoch, resumed")
    for kind in KINDS:
        (folder / kind).mkdir()
        found = order_of(job_on(kind, folder / kind), steps=30, seed=options.seed)
        wrong += not found.one
        hashes = " ".join(found.hashes.values())
        resumed = "with the next rows" if found.resumed else "WITH OTHERS"
        print(f"{kind:24s} {hashes}  {found.rows_per_epoch:4d}, {resumed}{'' if found.one else '  WRONG'}", flush=True)
    return wrong


def shares(folder: Path, options: argparse.Namespace) -> int:
    """The largest deviation of a count from its share over all prefixes."""
    dice = random.Random(options.seed)
    blends = {"0.7, 0.2, 0.1": [Fraction("0.7"), Fraction("0.2"), Fraction("0.1")]}
    for count in (2, 10, 100):
        blends[f"{count} drawn from 1 to 1000"] = [Fraction(dice.randint(1, 1000)) for _ in range(count)]
        blends[f"{count} over eight decades"] = [Fraction(f"{10 ** dice.uniform(-4, 4):.8f}1") for _ in range(count)]
    wrong = 0
    for name, weights in blends.items():
        total, split, rows = sum(weights), Split({str(i): w for i, w in enumerate(weights)}), 20_000
        counts, largest = [0] * len(weights), Fraction(0)
        for n in range(1, rows + 1):
            source, before = split.place(n - 1)
            assert before == counts[int(source)]
            counts[int(source)] += 1
            largest = max(largest, *(abs(c - n * w / total) for c, w in zip(counts, weights, strict=True)))
        wrong += largest >= 2
        print(f"{name:28s} {rows:,} rows: at most {float(largest):.3f} rows from a share", flush=True)
    return wrong


def bad(folder: Path, options: argparse.Namespace) -> int:
    """An example of each, and its message: of text, of token files, of blends."""
    wrong = 0
    for number, example in enumerate(TABLE):
        (place := folder / str(number)).mkdir()
        said = message(example, place)
        wrong += example.says not in said or "\n" in said
        print(f"{example.dataset:8s} {example.what:22s} {said.replace(f'{place}/', '')}")
    for case, (dataset, _, says) in token_files.BAD.items():
        (place := folder / case).mkdir()
        said = str(token_files.message(case, place))
        wrong += not re.search(says, said) or "\n" in said
        print(f"{dataset:8s} {case:22s} {said.replace(f'{place}/', '')}")
    token_files.ds(folder / "x.ds", [[1, 2, 99, 3]])
    try:
        token_files.opened("nanoset", folder / "x.ds", vocab_size=50).window(0, 4)
    except ConfigError as error:
        said = str(error)
    wrong += "token 2 (document 0) is 99" not in said
    print(f"{'nanoset':8s} {'an id too large':22s} {said.replace(f'{folder}/', '')}")
    for weight in ("0", "-0.5", "nan", "'a'"):
        try:
            load_config([f"--data.sources=[{{dataset = 'python_docs', weight = {weight}}}]"])
            said = "nothing"
        except ConfigError as error:
            said = describe_error(error)
        wrong += "data.sources[0].weight" not in said
        print(f"{'blend':8s} {f'a weight of {weight}':22s} {said}")
    return wrong


def minutes(folder: Path, options: argparse.Namespace) -> int:
    """A run on three sources of text, of which every row shows its source, and whose metrics count its tokens."""
    seconds = time.perf_counter()
    found = three_sources.train(
        folder,
        "--training.steps=1000000",
        f"--job.max_duration_minutes={options.minutes}",
        seed=options.seed,
        timeout=60 * options.minutes + 300,
    )
    rows, seconds = sum(found.counts.values()), time.perf_counter() - seconds
    print(
        f"{rows:,} rows in {seconds:.0f} s: {found.counts}; no prefix of them is further than {found.largest:.3f} ",
        end="",
    )
    print(f"rows from its shares; {found.wrong} are others than in one process, or told wrongly")
    return found.wrong + (found.largest >= 2)


def runs(folder: Path, options: argparse.Namespace) -> int:
    """The first and the last loss."""
    wrong = 0
    model = ["--model.args={vocab_size = 2048}", "--training.steps=20", "--training.seq_len=64"]
    for kind in KINDS:
        (folder / kind).mkdir()
        argv = [
            word for word in job_on(kind, folder / kind) if not word.startswith(("--model.args", "--training.steps"))
        ]
        try:
            losses = run_ranks(run_job, 2, [*argv, *model, "--optimizer.lr=3e-3"], timeout=600)[0].losses
        except RanksFailed as error:
            wrong += 1
            print(f"{kind:24s} FAILED: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        wrong += not losses[-1] < losses[0]
        print(f"{kind:24s} {len(losses)} steps on 2 ranks, loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    return wrong


def speed(folder: Path, options: argparse.Namespace) -> int:
    """Best and median of twenty times."""
    token_speed.write_tokens(folder / "r.ds", 1000)
    best, median, memory = token_speed.sampling(folder / "r.ds", 5_000, times=20)
    print(
        f"shuffled rows of {token_speed.SEQ_LEN} from a warm file of 1 GB, one core: best {best / 1e6:,.0f}, ", end=""
    )
    print(f"median {median / 1e6:,.0f} million tokens/s; {memory:+.1f} MB of anonymous memory")
    late = token_speed.start_late(folder / "r.ds")
    print(f"first row of step 1,000,000 from nothing: {late:.3f} s")
    token_speed.write_documents(folder, 10_000_000)
    opened = []
    for kind, file in (("nanoset", "x.ds"), ("megatron", "x")):
        found = token_speed.cost(lambda kind=kind, file=file: token_speed.opened(kind, folder / file))  # type: ignore[misc]
        opened.append(found.seconds)
        print(f"{kind} with 10,000,000 documents opened: {found.seconds:.2f} s, {found.anonymous_mb:+.1f} MB")
    return (median < 300e6) + (memory > 100) + (late > 1) + (max(opened) > 1)


def prepare(folder: Path, options: argparse.Namespace) -> int:
    """Of 64 MB of text, from the start of the command to its end."""
    prepare_speed.write_corpus(folder / "corpus.jsonl", 64)
    wrong = 0
    for workers in (1, 2):
        alone, found = prepare_speed.library_alone(folder / "corpus.jsonl"), None
        found = prepare_speed.measure(folder / "corpus.jsonl", workers)
        share = found[0] / alone[0] / workers
        wrong += share < 0.8
        print(f"{workers} worker(s): {found[0]:,.0f} tokens/s, the library on one thread {alone[0]:,.0f}: ", end="")
        print(f"{share:.2f} of it for each worker", flush=True)
    return wrong


PARTS = {part.__name__: part for part in (orders, shares, minutes, bad, runs, speed, prepare)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of what comes at random (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="of the part minutes (default: %(default)s)")
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
