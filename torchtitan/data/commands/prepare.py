"""``prepare``: make a data set into token files of datatrove or Megatron-LM, which many runs and programs read.

What each of its processes does is in tokens/prepare.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tqdm import tqdm

from torchtitan.config import load_config
from torchtitan.config.paths import local_path
from torchtitan.data.datasets import AnySource, is_stream, is_tokens, source_builder
from torchtitan.data.tokenizer import TOKENIZERS, special_ids
from torchtitan.data.tokens.encode import Encoding
from torchtitan.data.tokens.prepare import Preparation, Result, Target, prepare_stream, prepare_tokens
from torchtitan.errors import ConfigError, keys_told_as
from torchtitan.platforms import cores

_ENDINGS = (".ds", ".bin", ".idx")
_OWN_KEYS = {"data.cache_folder": "OUT"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "OUT",
        help="name of the files to write, without their endings: OUT.ds with its index and metadata, or OUT.bin and "
        "OUT.idx. What is done of it lies in OUT.ds.work, or OUT.megatron.work, until all is, so that the same command "
        "goes on after a kill",
    )
    parser.add_argument(
        "--format", choices=("ds", "megatron"), default="ds", help="whose files (default: ds, datatrove's)"
    )
    parser.add_argument(
        "--workers", type=int, default=cores(), metavar="N", help="processes (default: the cores there are)"
    )


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the files; ConfigError where the configuration or the text cannot be used."""
    if arguments.workers < 1:
        raise ConfigError("--workers", "at least one is needed")
    out = local_path(arguments.OUT, "OUT")
    out = out.with_suffix("") if out.suffix in _ENDINGS else out
    target, started = Target(out, arguments.format), time.monotonic()
    source, encoding = _source(overrides)
    before, workers = "", 1
    with keys_told_as(_OWN_KEYS):
        if is_tokens(source):
            results = [prepare_tokens(source, target)]
        elif is_stream(source):
            with _bar("document") as bar:
                results = [prepare_stream(source, _needed(encoding), target, lambda there: _show(bar, there))]
        else:
            plan = Preparation(source, _needed(encoding), target)
            pieces = source.num_pieces
            workers = min(arguments.workers, pieces)
            with plan.begun():
                if there := plan.pieces_done():
                    before = f" ({there} of {pieces} pieces were there)"
                results = _Workers(plan, workers, overrides).run()
    print(_told(target, results, before, workers, time.monotonic() - started))
    return 0


def _bar(unit: str, total: int | None = None) -> Any:
    """How far it is; told more often on a terminal than in a log."""
    often = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(desc="tokenising", total=total, unit=unit, mininterval=often, delay=1)


def _show(bar: Any, done: int) -> None:
    bar.update(done - bar.n)


def _needed(encoding: Encoding | None) -> Encoding:
    assert encoding is not None  # of text
    return encoding


def _source(overrides: Sequence[str]) -> tuple[AnySource, Encoding | None]:
    """What the configuration names, and how it becomes ids; None where it is ids already."""
    config = load_config(overrides)
    training, data = config.training, config.data
    if data.sources:
        raise ConfigError("data.sources", "one data set is prepared at a time; name it as training.dataset")
    build = source_builder(training.dataset, data.args, data.on_bad_record, key="training.dataset")
    source = build(training.dataset_path)
    if is_tokens(source):
        return source, None
    options = config.tokenizer.model_extra or {}
    tokenizer = TOKENIZERS.bind(config.tokenizer.name, options, key="tokenizer")(config.model.hf_assets_path)
    return source, Encoding(tokenizer, *special_ids(tokenizer, data))


class _Workers:
    """Processes that share a preparation, and the bar that shows how far they are."""

    def __init__(self, plan: Preparation, number: int, overrides: Sequence[str]) -> None:
        self._plan = plan
        context = multiprocessing.get_context("spawn")
        self._running: dict[Connection, Any] = {}
        # Each core has its process; the threads of a tokenizer's library would only be in their way.
        alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        before = {name: os.environ.get(name) for name in alone}
        os.environ.update(alone)
        try:
            for worker in range(number):
                receiver, sender = context.Pipe(duplex=False)
                start = worker * plan.source.num_pieces // number
                facts = (list(overrides), plan.target, plan.source.fingerprint, start)
                process = context.Process(target=_work, args=(*facts, sender), daemon=True)
                process.start()
                sender.close()
                self._running[receiver] = process
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def run(self) -> list[Result]:
        """What each did; the first error of one of them ends all."""
        results: list[Result] = []
        with _bar("piece", self._plan.source.num_pieces) as bar:
            try:
                while self._running:
                    for receiver in wait(list(self._running), timeout=0.5):
                        assert isinstance(receiver, Connection)
                        results.append(self._end_of(receiver))
                    _show(bar, self._plan.pieces_done())
            finally:
                for process in self._running.values():
                    process.terminate()
        return results

    def _end_of(self, receiver: Connection) -> Result:
        process = self._running[receiver]
        try:
            found = receiver.recv()
        except EOFError:
            process.join()
            how = f"was ended by signal {-process.exitcode}" if process.exitcode < 0 else "failed, as it says above"
            raise ChildProcessError(
                f"a worker {how}; the same command goes on with the pieces in {self._plan.target.work}"
            ) from None
        del self._running[receiver]
        if isinstance(found, ConfigError):
            raise found
        process.join()
        assert isinstance(found, Result)
        return found


def _work(overrides: list[str], target: Target, fingerprint: str, start: int, sender: Connection) -> None:
    """What a worker does: its share, and then it says what that was, or what a person can mend."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked for it ends the workers
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        with keys_told_as(_OWN_KEYS):
            source, encoding = _source(overrides)
            assert not is_tokens(source) and not is_stream(source)
            if source.fingerprint != fingerprint:
                raise ConfigError("training.dataset_path", "was changed while it was read")
            sender.send(Preparation(source, _needed(encoding), target).share(start))
    except ConfigError as error:
        sender.send(error)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _told(target: Target, results: Sequence[Result], before: str, workers: int, seconds: float) -> str:
    """What was done, in a few lines."""
    made = sum(result.made_tokens for result in results)
    whole = next((result for result in results if result.tokens), None)
    lines = [f"{path}: {path.stat().st_size:,} bytes" for path in target.files]
    if whole is not None:
        lines.append(f"{whole.tokens:,} tokens of {whole.documents:,} documents, {whole.dtype}")
        if whole.skipped:
            first = f", the first: {whole.first_skipped}" if whole.first_skipped else ""
            lines.append(f"{whole.skipped:,} bad records skipped{first}")
    lines.append(f"{made:,} tokens in {seconds:.1f} s{before}: {made / seconds:,.0f} tokens/s, {workers} worker(s)")
    return "\n".join(lines)
