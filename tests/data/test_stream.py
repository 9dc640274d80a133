import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.test_tokens import opened as written
from torchtitan.data.datasets import DATASETS, Interrupted, Place, Skipped, StreamSource
from torchtitan.data.loader import build_loader
from torchtitan.data.rows.build import build_rows, build_rows_once
from torchtitan.data.rows.stream import StreamRows
from torchtitan.data.tokenizers.utf8 import BytesTokenizer
from torchtitan.data.tokens import stream, stream_reader
from torchtitan.data.tokens.encode import Encoding
from torchtitan.data.tokens.journal import Progress, read_journal
from torchtitan.data.tokens.stream import StreamTokens, open_stream
from torchtitan.errors import ConfigError
from torchtitan.log import logger

DOCUMENTS = [f"document {i} " * (i % 7) for i in range(400)]
IDS = [i for text in DOCUMENTS for i in (*text.encode(), 257)]
CONTEXT = multiprocessing.get_context("fork")


class Listed:
    """A stream of given documents, five at a time; says in a file which of them were read by whom."""

    name = "listed"
    description = "for a test"
    fingerprint = "listed"

    def __init__(
        self,
        documents: list[Any] = DOCUMENTS,
        *,
        at_once: int = 20,
        shuffle_rows: int = 8,
        log: Path | None = None,
        seconds: float = 0,
    ) -> None:
        self.documents, self.log, self.seconds = documents, log, seconds
        self.documents_at_once, self.shuffle_rows = at_once, shuffle_rows

    def read_from(self, place: Place) -> Iterator[tuple[list[str | Skipped], Place]]:
        for start in range(place.records, len(self.documents), 5):
            if self.log is not None:
                with open(self.log, "a") as log:
                    log.write(f"{os.getpid()} {start}\n")
            time.sleep(self.seconds)
            found = self.documents[start : start + 5]
            if ConfigError in found:
                raise ConfigError("training.dataset_path", "gone for good")
            yield found, Place(start + len(found), {"next": start + len(found)})


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    stream_reader._stop_readers()
    assert not [t for t in threading.enumerate() if t.name.startswith("stream ")]


def opened(folder: Path, source: StreamSource | None = None) -> StreamTokens:
    return open_stream(source or Listed(), Encoding(BytesTokenizer(), None, 257), cache_folder=str(folder))


def rows_of(folder: Path, source: StreamSource | None = None, seq_len: int = 31, **options: Any) -> StreamRows:
    return StreamRows(opened(folder, source), **{"seq_len": seq_len, "shuffle": True, "seed": 3, **options})


def journal(folder: Path) -> Progress:
    (file,) = folder.glob("*.journal")
    return read_journal(file)[0]


class TestTokens:
    def test_come_when_they_are_needed(self, tmp_path: Path) -> None:
        tokens = opened(tmp_path)
        assert 0 < journal(tmp_path).documents < 100
        assert tokens.window(5000, 100).tolist() == IDS[5000:5100]
        assert 5100 <= journal(tmp_path).tokens < len(IDS)
        with pytest.raises(ConfigError, match="when all of it was read") as error:
            len(tokens)
        assert error.value.key == "data.args.streaming"

    def test_are_a_circle_when_the_stream_has_ended(self, tmp_path: Path) -> None:
        tokens = opened(tmp_path)
        wide = len(IDS) + 50
        assert tokens.window(len(IDS) - 50, wide).tolist() == (IDS * 3)[len(IDS) - 50 :][:wide]
        assert len(tokens) == len(IDS) and tokens.window(7 * len(IDS) + 3, 4).tolist() == IDS[3:7]
        assert journal(tmp_path) == Progress(len(IDS), 400, 400, 0, sum(map(len, DOCUMENTS)), 1)
        (ds,) = tmp_path.glob("*.ds")
        assert np.fromfile(ds, "<u2").tolist() == IDS
        assert np.fromfile(f"{ds}.index", "<u8").tolist() == [i + 1 for i, token in enumerate(IDS) if token == 257]
        assert Path(f"{ds}.metadata").read_text().startswith(f"bytes|2\n{len(IDS)}\n")

    def test_are_read_once(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        for stop in (3000, 2000, 9000):
            tokens = opened(tmp_path / "cache", Listed(log=log))
            assert tokens.window(stop - 10, 10).tolist() == IDS[stop - 10 : stop]
            tokens.rest()
        starts = [int(line.split()[1]) for line in log.read_text().splitlines()]
        # Of a piece that was not written down yet, what was read is read again.
        assert starts == sorted(starts) and len(starts) - len(set(starts)) <= 8

    def test_survive_a_pickle(self, tmp_path: Path) -> None:
        tokens = pickle.loads(pickle.dumps(opened(tmp_path)))
        assert tokens.window(2000, 5).tolist() == IDS[2000:2005]

    def test_documents_of_all_sizes(self, tmp_path: Path) -> None:
        documents = ["", "x" * 50_000, "", Skipped("a: record 4: null"), "y", ""]
        tokens = opened(tmp_path, Listed(documents))
        assert tokens.window(0, 50_006).tolist() == [257, *[120] * 50_000, 257, 257, 121, 257, 257]
        assert (journal(tmp_path).documents, journal(tmp_path).skipped, journal(tmp_path).records) == (5, 1, 6)

    @pytest.mark.parametrize("documents", [[], [Skipped("a: record 1: null")]])
    def test_nothing_at_all_is_refused(self, tmp_path: Path, documents: list[Any]) -> None:
        for _ in range(2):
            with pytest.raises(ConfigError, match="the data set is empty") as error:
                opened(tmp_path, Listed(documents))
            assert ("record 1: null" in error.value.problem) == bool(documents)

    def test_a_file_that_loses_its_end_meanwhile(self, tmp_path: Path) -> None:
        tokens = opened(tmp_path)
        (ds,) = tmp_path.glob("*.ds")
        os.truncate(ds, 100)
        with pytest.raises(ConfigError, match=r"\.ds has lost its end; remove .*listed"):
            tokens.window(9000, 10)

    @pytest.mark.parametrize("ending", [".ds", ".ds.index", ".journal"])
    @pytest.mark.parametrize("what", ["zeros", "cut off", "a bit", "gone"])
    def test_what_was_changed_is_read_anew(
        self, tmp_path: Path, ending: str, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened(tmp_path).window(3000, 10)
        stream_reader._stop_readers()
        (ds,) = tmp_path.glob("*.ds")
        file = ds.with_name(ds.stem + ending)
        content = file.read_bytes()
        if what == "gone":
            file.unlink()
        else:
            changed = {"zeros": bytes(len(content)), "cut off": content[:30], "a bit": content[:5] + b"#" + content[6:]}
            file.write_bytes(changed[what])
        warned: list[str] = []
        monkeypatch.setattr(logger, "warning", warned.append)
        tokens = opened(tmp_path)
        assert tokens.window(0, len(IDS)).tolist() == IDS
        assert tokens.documents.starts(0, 400).tolist()[1:] == [i + 1 for i, t in enumerate(IDS[:-1]) if t == 257]
        # Without a journal, or with less than a record of it, nothing says that there was anything.
        told = ending != ".journal" or what in ("zeros", "a bit")
        assert len(warned) == told and all(str(ds) in line and "reading it anew" in line for line in warned)

    def test_what_was_changed_while_another_reads_on_is_refused(self, tmp_path: Path) -> None:
        tokens = opened(tmp_path)
        tokens.window(2000, 1)  # whose reader waits for who needs more
        (ds,) = tmp_path.glob("*.ds")
        ds.write_bytes(bytes(ds.stat().st_size))
        with pytest.raises(ConfigError, match="and another process reads on behind them"):
            opened(tmp_path)
        tokens.rest()

    def test_a_journal_of_an_older_format_is_read_anew(self, tmp_path: Path) -> None:
        """Its records had no hash of their pieces: 56 bytes each."""
        opened(tmp_path).window(3000, 10)
        stream_reader._stop_readers()
        (file,) = tmp_path.glob("*.journal")
        there = journal(tmp_path)
        numbers = struct.pack("<6Q", there.tokens, there.documents, there.records, 0, there.text_bytes, 0)
        file.write_bytes((numbers + hashlib.blake2b(numbers, digest_size=8).digest()) * 9)
        assert opened(tmp_path).window(0, len(IDS)).tolist() == IDS

    def test_a_place_that_is_lost_is_counted(self, tmp_path: Path) -> None:
        opened(tmp_path).window(3000, 10)
        stream_reader._stop_readers()
        (place,) = tmp_path.glob("*.place-*")
        place.unlink()
        assert opened(tmp_path).window(9000, 10).tolist() == IDS[9000:9010]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    tokens = opened(tmp_path)
    (journal_file,) = tmp_path.glob("*.journal")
    tokens.path.with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left") as error:
        tokens.window(9000, 10)
    assert error.value.key == "data.cache_folder" and journal_file.exists()


class Breaking(Listed):
    """Breaks off, once at each of some records."""

    def __init__(self, at: set[int], **options: Any) -> None:
        super().__init__(**options)
        self.at = at

    def read_from(self, place: Place) -> Iterator[tuple[list[str | Skipped], Place]]:
        for found, after in super().read_from(place):
            if after.records in self.at:
                self.at.discard(after.records)
                raise Interrupted("connection reset")
            yield found, after


class TestBreaks:
    @pytest.fixture(autouse=True)
    def _quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream_reader, "_RETRY_SECONDS", (0.01, 0.02))

    def test_a_stream_that_breaks_off_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        warned: list[str] = []
        monkeypatch.setattr(logger, "warning", warned.append)
        tokens = opened(tmp_path, Breaking({10, 15, 200, 400}))
        assert tokens.window(0, len(IDS)).tolist() == IDS
        assert len(warned) == 4 and all("connection reset" in w and "reading on in" in w for w in warned)

    def test_one_that_never_comes_back_is_told(self, tmp_path: Path) -> None:
        class Gone(Listed):
            def read_from(self, place: Place) -> Iterator[tuple[list[str | Skipped], Place]]:
                for found, after in super().read_from(place):
                    if after.records > 100:
                        raise Interrupted("no route")
                    yield found, after

        tokens = opened(tmp_path, Gone())
        tokens.want(9000)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"broke off 3 times after record 100 \(no route\)"):
                tokens.window(9000, 10)
        assert tokens.window(100, 10).tolist() == IDS[100:110]

    def test_what_does_not_mend_itself_is_told_at_once_through_a_worker(self, tmp_path: Path) -> None:
        source = Listed([*DOCUMENTS[:100], ConfigError])
        for workers in (0, 1):
            loader = build_loader(
                rows_of(tmp_path, source, shuffle=False),
                global_batch_size=4,
                ranks=1,
                rank=0,
                local_batch_size=4,
                num_workers=workers,
            )
            with pytest.raises(ConfigError, match="gone for good") as error:
                for _ in loader:
                    pass
            assert str(error.value) == "training.dataset_path: gone for good"
            loader.close()


def test_waiting_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tokens = opened(tmp_path, Listed(seconds=0.02))
    monkeypatch.setattr(logger, "info", said.append)
    monkeypatch.setattr(stream, "_TOLD_SECONDS", 0.1)
    tokens.window(6000, 1)
    assert any("waiting for its tokens" in line and "6,001 are needed" in line for line in said)


class TestRows:
    def test_order_is_shuffled_in_blocks(self, tmp_path: Path) -> None:
        rows = rows_of(tmp_path)
        order = [rows.window_of(row) for row in range(64)]
        blocks = [order[i : i + 8] for i in range(0, 64, 8)]
        assert [sorted(block) for block in blocks] == [list(range(i, i + 8)) for i in range(0, 64, 8)]
        assert len({tuple(w % 8 for w in block) for block in blocks}) > 5
        assert order != [rows_of(tmp_path, seed=4).window_of(row) for row in range(64)]
        plain = rows_of(tmp_path, shuffle=False)
        assert [plain.window_of(row) for row in range(64)] == list(range(64))
        with pytest.raises(IndexError):
            rows.window_of(-1)

    def test_rows_are_windows_of_the_circle(self, tmp_path: Path) -> None:
        rows = rows_of(tmp_path)
        around = IDS * 3
        for row in (0, 5, 100, len(IDS) // 32 - 1, len(IDS) // 32, 2 * len(IDS) // 32):
            start = 32 * rows.window_of(row)
            tokens, labels, positions = rows[row]
            assert tokens.tolist() == around[start : start + 31]
            assert labels.tolist() == around[start + 1 : start + 32]
            assert positions.tolist() == list(range(31))

    def test_fingerprint_follows_what_rows_depend_on(self, tmp_path: Path) -> None:
        same = [rows_of(tmp_path), rows_of(tmp_path / "elsewhere"), rows_of(tmp_path, Listed(at_once=7))]
        other = [
            rows_of(tmp_path, seq_len=15),
            rows_of(tmp_path, seed=4),
            rows_of(tmp_path, shuffle=False),
            rows_of(tmp_path, Listed(shuffle_rows=16)),
        ]
        assert len({r.fingerprint for r in same}) == 1
        assert len({r.fingerprint for r in same + other}) == 5


class TestDocuments:
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_rows_are_those_of_the_same_documents_in_a_file(self, tmp_path: Path, shuffle: bool) -> None:
        """From windows that are not there yet to those of the second epoch."""
        in_a_file = written(tmp_path / "text", DOCUMENTS, bos_id=None, eos_id=257)
        windows = rows_of(tmp_path, shuffle=shuffle)
        rows = build_rows(opened(tmp_path), packing="documents", seq_len=31, shuffle=shuffle, seed=3)
        expected = build_rows(in_a_file, packing="documents", seq_len=31, shuffle=False, seed=0)
        for row in (0, 5, 100, len(IDS) // 32 - 1, len(IDS) // 32, 2 * len(IDS) // 32):
            assert_same(rows[row], expected[windows.window_of(row)])
        copy = pickle.loads(pickle.dumps(rows))
        assert_same(copy[77], expected[windows.window_of(77)])
        assert rows.fingerprint == copy.fingerprint != windows.fingerprint

    def test_whole_ones_cannot_be_put_together(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match='"best_fit" needs to know all documents') as refused:
            build_rows(opened(tmp_path), packing="best_fit", seq_len=31, shuffle=False, seed=0)
        assert refused.value.key == "data.packing"

    @pytest.mark.parametrize("packing", ["concat", "documents"])
    def test_are_looked_at_once_and_read_no_further(self, tmp_path: Path, packing: Any) -> None:
        table = build_rows_once(opened(tmp_path), packing=packing, seq_len=31)
        in_a_file = written(tmp_path / "text", DOCUMENTS, bos_id=None, eos_id=257)
        whole = build_rows_once(in_a_file, packing=packing, seq_len=31)(None)
        some = table(40)
        for row in range(40):
            assert_same(some[row], whole[row])
        assert len(some) == 40 and journal(tmp_path).tokens < len(IDS) // 2
        everything = table(None)
        assert len(everything) == len(whole) and journal(tmp_path).ended
        assert_same(everything[len(whole) - 1], whole[len(whole) - 1])


def assert_same(row: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    assert all(a.equal(b) for a, b in zip(row, other, strict=True))


def write_lines(folder: Path) -> list[str]:
    for name, part in (("a", DOCUMENTS[:150]), ("b", DOCUMENTS[150:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in part))
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def local_stream(files: list[str], on_bad_record: str = "raise", **options: Any) -> StreamSource:
    options = {"data_files": files, "streaming": True, "documents_at_once": 30, "shuffle_rows": 8, **options}
    return DATASETS.bind("hub", options, key="data.args")("json", on_bad_record)


def global_rows(rows: StreamRows, steps: range, *, ranks: int = 1, workers: int = 0, batch: int = 6) -> list[list[int]]:
    """Tokens of each row of these steps in the global order."""
    by_rank = []
    for rank in range(ranks):
        loader = build_loader(
            rows,
            global_batch_size=batch,
            ranks=ranks,
            rank=rank,
            local_batch_size=batch,
            first_row=steps.start * batch,
            num_workers=workers,
        )
        with contextlib.closing(loader):
            by_rank.append([torch.cat([b.tokens for b in step]) for step in itertools.islice(loader, len(steps))])
    return [row for step in zip(*by_rank, strict=True) for part in step for row in part.tolist()]


def test_rows_are_those_of_the_text_for_any_ranks_and_workers(tmp_path: Path) -> None:
    """Local files streamed by the datasets library: across the end of the stream, and resumed in a fresh cache."""
    source = local_stream(write_lines(tmp_path))
    steps = range(len(IDS) // 32 // 6 + 8)
    plain = rows_of(tmp_path / "plain", Listed())
    expected = [(IDS * 2)[32 * plain.window_of(row) :][:31] for row in range(6 * len(steps))]
    for ranks, workers in ((1, 0), (2, 0), (1, 2), (2, 2)):
        folder = tmp_path / f"{ranks}-{workers}"
        assert global_rows(rows_of(folder, source), steps, ranks=ranks, workers=workers) == expected
        assert journal(folder).ended
    middle = range(len(steps) // 2, len(steps) // 2 + 3)
    assert global_rows(rows_of(tmp_path / "fresh", source), middle) == expected[6 * middle.start : 6 * middle.stop]


def train(folder: Path, rank: int, ranks: int, workers: int, seconds: float) -> None:
    """Rows of a rank, each written to a file when it came."""
    source = Listed(seconds=seconds, log=folder / "log")
    loader = build_loader(
        rows_of(folder / "cache", source),
        global_batch_size=6,
        ranks=ranks,
        rank=rank,
        local_batch_size=6,
        num_workers=workers,
    )
    steps = [torch.cat([b.tokens for b in step]) for step in itertools.islice(loader, 30)]
    loader.close()
    np.save(folder / f"rows-{rank}.npy", torch.stack(steps).numpy())


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_read_it_together_and_one_that_is_killed_is_made_up_for(tmp_path: Path, workers: int) -> None:
    processes = [CONTEXT.Process(target=train, args=(tmp_path, rank, 3, workers, 0.01)) for rank in range(3)]
    for process in processes:
        process.start()
    log = tmp_path / "log"

    def readers() -> list[int]:
        return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []

    deadline = time.monotonic() + 60
    # Wherever it is read by then: in a rank, or in a worker, of which the rank must not go on without it.
    while len(readers()) < 30 and time.monotonic() < deadline:
        time.sleep(0.005)
    killed = [p for p in processes if p.pid == readers()[-1]]
    if workers == 0:
        assert killed
        os.kill(killed[0].pid or 0, signal.SIGKILL)
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    left = [rank for rank, process in enumerate(processes) if process not in killed]
    assert [processes[rank].exitcode for rank in left] == [0] * len(left)
    plain = rows_of(tmp_path / "plain")
    for rank in left:
        rows = np.load(tmp_path / f"rows-{rank}.npy")
        expected = [IDS[32 * plain.window_of(6 * step + 2 * rank + k) :][:31] for step in range(30) for k in range(2)]
        assert rows.reshape(-1, 31).tolist() == expected
    starts = [int(line.split()[1]) for line in log.read_text().splitlines()]
    # One at a time: only a change of who reads repeats anything, and no more than a piece.
    assert len(starts) - len(set(starts)) <= 4 * (3 + 3 * workers)


def test_killed_again_and_again_it_still_gets_there(tmp_path: Path) -> None:
    """At moments that differ, while pieces are written: the file is that of a reading in one."""
    opened(tmp_path / "cache", Listed(at_once=20))
    kills = 0
    while not journal(tmp_path / "cache").ended:
        process = CONTEXT.Process(target=_read_all, args=(tmp_path / "cache",))
        process.start()
        process.join(0.05 + 0.0137 * (kills % 11))
        process.kill()
        process.join()
        kills += 1
        assert kills < 200
    assert kills > 1
    (ds,) = (tmp_path / "cache").glob("*.ds")
    assert np.fromfile(ds, "<u2").tolist() == IDS
    assert len(np.fromfile(f"{ds}.index", "<u8")) == 400
    assert opened(tmp_path / "cache").window(0, len(IDS)).tolist() == IDS


def _read_all(folder: Path) -> None:
    opened(folder, Listed(seconds=0.002, at_once=20)).window(0, len(IDS) + 1)


def test_a_process_that_is_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The child of a reader outlives it; another process reads on all the same."""

    def read_and_fork() -> None:
        tokens = opened(tmp_path / "cache")
        tokens.window(2000, 1)
        if os.fork() == 0:
            (tmp_path / "child").write_text(str(os.getpid()))
            time.sleep(30)
        os._exit(0)

    process = CONTEXT.Process(target=read_and_fork)
    process.start()
    process.join()
    while not (tmp_path / "child").exists():
        time.sleep(0.01)
    try:
        assert opened(tmp_path / "cache").window(9000, 5).tolist() == IDS[9000:9005]
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_the_interpreter_ends_while_a_stream_is_read(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import sys; from tests.data.test_stream import *\n"
        "tokens = opened(Path(sys.argv[1]), Listed(seconds=0.05)); tokens.want(10_000); print(tokens.window(0, 1)[0])"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [str(IDS[0])]), done.stderr
    assert "Fatal" not in done.stderr and time.monotonic() - began < 40


class TestLocalStreams:
    def test_places_are_found_again(self, tmp_path: Path) -> None:
        source = local_stream(write_lines(tmp_path))
        batches = list(source.read_from(Place()))
        assert [text for found, _ in batches for text in found] == DOCUMENTS
        for _, place in batches[:-1]:
            for again in (Place(place.records, json.loads(json.dumps(place.state))), Place(place.records)):
                rest = [text for found, _ in source.read_from(again) for text in found]
                assert rest == DOCUMENTS[place.records :]

    def test_bad_records_have_a_place(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
        with pytest.raises(
            ConfigError, match=r"json \(.*a\.jsonl\): record 2: null, not text; mend it, or set data\.on_bad_record"
        ):
            list(local_stream([str(path)]).read_from(Place()))
        ((found, _),) = local_stream([str(path)], "skip").read_from(Place())
        assert [str(text) for text in found] == ["a", f"json ({path}): record 2: null, not text", "b"]

    def test_another_file_of_the_same_name_size_and_time_is_another_stream(self, tmp_path: Path) -> None:
        found = set()
        for text in ("one", "two"):
            (tmp_path / text).mkdir()
            path = tmp_path / text / "a.jsonl"
            path.write_text(json.dumps({"text": text}) + "\n")
            os.utime(path, ns=(1, 1))
            os.replace(path, tmp_path / "a.jsonl")
            found.add(local_stream([str(tmp_path / "a.jsonl")]).fingerprint)
        assert len(found) == 2

    def test_a_file_that_is_rewritten_meanwhile_is_told_at_the_end(self, tmp_path: Path) -> None:
        files = write_lines(tmp_path)
        source = local_stream(files)
        os.utime(files[0], ns=(1, 1))
        read = source.read_from(Place())
        next(read)
        with pytest.raises(ConfigError, match=r"a\.jsonl was changed while it was read"):
            list(read)

    def test_a_damaged_file_is_no_network_that_comes_back(self, tmp_path: Path) -> None:
        first, second = write_lines(tmp_path)
        Path(second).write_text('{"text": "x"}\n{nope\n')
        with pytest.raises(ConfigError, match=r"json \(.*: cannot be read after record 150"):
            list(local_stream([first, second]).read_from(Place()))
        Path(second).unlink()
        with pytest.raises(ConfigError, match=r"Unable to find .*b\.jsonl"):
            local_stream([first, second])
