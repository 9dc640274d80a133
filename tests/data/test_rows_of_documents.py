"""Rows in which no document sees another, against what they are by definition, over lengths of every odd kind."""

import itertools
import multiprocessing
import pickle
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.lines import Line
from tests.data.test_tokens import opened
from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.rows.bins import best_fit, cut_documents
from torchtitan.data.rows.build import build_rows
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.rows.rows import Rows
from torchtitan.errors import ConfigError
from torchtitan.log import logger

LENGTHS = [
    [5, 1, 3, 7, 2, 9, 4],
    [0, 0, 4, 0, 6, 1, 1, 1, 0],
    [900],
    [1],
    [2],
    [1, 1, 1, 1],
    [3, 400, 2, 17, 16, 18, 1],
    [int(length) for length in np.random.default_rng(0).integers(0, 40, 200)],
]
SIZES = [1, 2, 7, 16, 64]  # the largest is more than all the data of some
CASES = list(itertools.product(LENGTHS, SIZES))
IDS = [f"{len(lengths)} documents of {sum(lengths)} tokens, {seq_len}" for lengths, seq_len in CASES]


def rows_of(tokens: Any, packing: Any, folder: Path, seq_len: int, *, shuffle: bool = False, seed: int = 0) -> Rows:
    return build_rows(
        tokens, packing=packing, seq_len=seq_len, shuffle=shuffle, seed=seed, cache_folder=str(folder / "cache")
    )


def lists(rows: Rows, row: int) -> tuple[list[int], list[int], list[int]]:
    tokens, labels, positions = rows[row]
    assert all(t.dtype == torch.int64 and t.shape == (rows.seq_len,) for t in (tokens, labels, positions))
    return tokens.tolist(), labels.tolist(), positions.tolist()


@pytest.mark.parametrize(("lengths", "seq_len"), CASES, ids=IDS)
def test_windows_know_where_documents_begin(tmp_path: Path, lengths: list[int], seq_len: int) -> None:
    line = Line(lengths)
    if max(lengths) < 2:
        with pytest.raises(ConfigError, match="no document has two tokens"):
            rows_of(line, "documents", tmp_path, seq_len)
        return
    begins = {sum(lengths[:d]) for d in range(len(lengths)) if lengths[d]}
    rows, windows = rows_of(line, "documents", tmp_path, seq_len), rows_of(line, "concat", tmp_path, seq_len)
    assert rows.rows_per_epoch == windows.rows_per_epoch
    for row in range(2 * rows.rows_per_epoch + 3):
        tokens, labels, positions = lists(rows, row)
        plain = lists(windows, row)
        assert tokens == plain[0]
        # The first token of a document is no label, and all others are.
        assert labels == [IGNORE_INDEX if label in begins else label for label in plain[1]]
        count, expected = 0, []
        for place, token in enumerate(tokens):
            count = 0 if place == 0 or token in begins else count + 1
            expected.append(count)
        assert positions == expected


def test_windows_come_in_the_order_of_concat(tmp_path: Path) -> None:
    line = Line(LENGTHS[-1])
    rows, windows = (rows_of(line, packing, tmp_path, 16, shuffle=True, seed=3) for packing in ("documents", "concat"))
    for row in range(3 * rows.rows_per_epoch):
        assert torch.equal(rows[row][0], windows[row][0])


def test_what_is_no_label_in_windows_is_what_begins_a_document_or_a_window(tmp_path: Path) -> None:
    lengths = LENGTHS[-1]
    rows = rows_of(Line(lengths), "documents", tmp_path, 6)
    seen = {label for row in range(rows.rows_per_epoch) for label in lists(rows, row)[1]} - {IGNORE_INDEX}
    begins = {sum(lengths[:d]) for d in range(len(lengths))}
    windows = set(range(0, sum(lengths), 7))
    taken = range(7 * rows.rows_per_epoch)
    assert set(taken) - seen == (begins | windows) & set(taken)


@pytest.mark.parametrize(("lengths", "seq_len"), CASES, ids=IDS)
def test_best_fit_predicts_each_token_but_the_first_of_a_document_once(
    tmp_path: Path, lengths: list[int], seq_len: int
) -> None:
    begins = np.cumsum([0, *lengths]).tolist()
    document = np.repeat(np.arange(len(lengths)), lengths)
    if max(lengths) < 2:
        with pytest.raises(ConfigError, match="no document has two tokens") as refused:
            rows_of(Line(lengths), "best_fit", tmp_path, seq_len)
        assert refused.value.key == "training.dataset_path"
        return
    rows = rows_of(Line(lengths), "best_fit", tmp_path, seq_len)
    for epoch in range(2):
        predicted: list[int] = []
        for row in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
            tokens, labels, positions = lists(rows, row)
            padding = len(labels)
            while padding and labels[padding - 1] == IGNORE_INDEX:
                padding -= 1
            assert padding > 0 and IGNORE_INDEX not in labels[:padding], "padding stands at the end"
            assert tokens[padding:] == [0] * (seq_len - padding)
            assert positions[padding:] == list(range(seq_len - padding))
            for place in range(padding):
                assert labels[place] == tokens[place] + 1 and document[labels[place]] == document[tokens[place]]
                if positions[place]:
                    assert positions[place] == positions[place - 1] + 1 and tokens[place] == tokens[place - 1] + 1
            # A piece begins with its document, or where the piece before it ended: in a row of its own.
            starts = [tokens[place] for place in range(padding) if positions[place] == 0]
            assert all((start - begins[document[start]]) % seq_len == 0 for start in starts)
            predicted += labels[:padding]
        assert sorted(predicted) == sorted(set(range(sum(lengths))) - set(begins))


def defined(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing, piece by piece: how full the rows are."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fullest = max(
            (row for row in range(len(rows)) if rows[row] + length <= capacity), key=rows.__getitem__, default=None
        )
        if fullest is None:
            rows.append(length)
        else:
            rows[fullest] += length
    return sorted(rows)


@pytest.mark.parametrize("capacity", [1, 5, 16, 40, 100])
@pytest.mark.parametrize("spread", [1, 6, 40])
def test_many_at_once_are_placed_as_one_by_one(capacity: int, spread: int) -> None:
    """Which of several rows with equal room is taken is free, and leaves the room that there is unchanged."""
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, min(spread, capacity) + 1, 150)
        row_of, rows = best_fit(lengths, capacity)
        found = [int(lengths[row_of == row].sum()) for row in range(rows)]
        assert sorted(found) == defined(lengths.tolist(), capacity)


def test_rows_of_best_fit_follow_the_documents_unless_they_are_shuffled(tmp_path: Path) -> None:
    line = Line(LENGTHS[-1])
    rows = rows_of(line, "best_fit", tmp_path, 16)
    begins = [lists(rows, row)[0] for row in range(rows.rows_per_epoch)]
    assert [tokens[0] for tokens in begins] == sorted(tokens[0] for tokens in begins)
    epochs = []
    shuffled = rows_of(line, "best_fit", tmp_path, 16, shuffle=True, seed=1)
    for epoch in range(3):
        first = epoch * rows.rows_per_epoch
        epochs.append([lists(shuffled, first + row)[0] for row in range(rows.rows_per_epoch)])
        assert sorted(epochs[-1]) == sorted(begins) and epochs[-1] != begins
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_plan_is_made_once_and_again_where_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    line = Line(LENGTHS[-1])
    first = lists(rows_of(line, "best_fit", tmp_path, 16), 5)
    (path,) = (tmp_path / "cache").iterdir()
    told = re.findall(r"best_fit: .*", caplog.text)
    assert len(told) == 1 and re.search(r"hold [\d,]+ pieces of 200 documents; \d+\.\d\d % is padding", told[0])
    made = path.stat().st_mtime_ns
    assert lists(rows_of(line, "best_fit", tmp_path, 16), 5) == first and path.stat().st_mtime_ns == made
    rows_of(line, "best_fit", tmp_path, 17)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    whole = path.read_bytes()
    for damage in (whole[:-4], b"", bytes(40), whole[:32] + bytes(len(whole) - 32), whole[:90] + b"#" + whole[91:]):
        path.write_bytes(damage)
        assert lists(rows_of(line, "best_fit", tmp_path, 16), 5) == first and path.read_bytes() == whole
        assert f"{path} is damaged" in caplog.text
        caplog.clear()


def test_a_plan_that_cannot_be_kept_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="cannot keep plans") as refused:
        rows_of(Line([5]), "best_fit", tmp_path, 4)
    assert refused.value.key == "data.cache_folder"


def plan_and_read(folder: Path) -> list[list[int]]:
    rows = rows_of(Line(LENGTHS[-1]), "best_fit", folder, 16)
    return [lists(rows, row)[0] for row in range(rows.rows_per_epoch)]


def test_ranks_plan_together(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        found = pool.map(plan_and_read, [tmp_path] * 3, chunksize=1)
    assert found[0] == found[1] == found[2] == plan_and_read(tmp_path / "alone")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_without_an_index_packing_is_refused_by_name(tmp_path: Path, packing: str) -> None:
    with pytest.raises(ConfigError, match=f'"{packing}" needs to know where documents begin') as refused:
        rows_of(Line([5, 6], indexed=False), packing, tmp_path, 4)
    assert refused.value.key == "data.packing"
    assert isinstance(rows_of(Line([5, 6], indexed=False), "concat", tmp_path, 4), ConcatRows)


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_fingerprints_and_travel(tmp_path: Path, packing: str) -> None:
    tokens = opened(tmp_path, ["one two three", "four", "", "five, six"])

    def fingerprint(tokens: Any = tokens, seq_len: int = 6, **options: Any) -> str:
        return rows_of(tokens, packing, tmp_path, seq_len, **options).fingerprint

    assert fingerprint(seed=1) == fingerprint(seed=2), "unshuffled rows do not depend on the seed"
    different = [
        fingerprint(),
        fingerprint(seq_len=7),
        fingerprint(shuffle=True),
        fingerprint(shuffle=True, seed=1),
        fingerprint(opened(tmp_path, ["one two three", "four", "five, sixes"])),
        rows_of(tokens, "concat", tmp_path, 6).fingerprint,
        # The same tokens, of other documents.
        fingerprint(Line([5, 6])),
        fingerprint(Line([6, 5])),
    ]
    assert len(set(different)) == len(different)
    rows = rows_of(tokens, packing, tmp_path, 6, shuffle=True)
    content = pickle.dumps(rows)
    copy = pickle.loads(content)
    assert lists(copy, 9) == lists(rows, 9) and copy.fingerprint == rows.fingerprint
    assert len(content) < 2000, "it travels as its paths"


def test_ten_million_documents(tmp_path: Path) -> None:
    """A window costs microseconds wherever it is, and rows are planned in seconds."""
    lengths = np.random.default_rng(0).integers(0, 1400, 10_000_000)
    line = Line(lengths)
    rows = rows_of(line, "documents", tmp_path, 4096, shuffle=True)
    seconds = []
    for row in range(200):
        start = time.perf_counter()
        rows[row]
        seconds.append(time.perf_counter() - start)
    print(f"{1e6 * np.median(seconds):.0f} µs a window of 4096")
    assert np.median(seconds) < 1e-3
    start = time.process_time()
    _, pieces = cut_documents(np.cumsum(lengths) - lengths, np.cumsum(lengths), 4096)
    row_of, count = best_fit(pieces, 4096)
    print(f"planned in {time.process_time() - start:.1f} s: {count:,} rows")
    assert time.process_time() - start < 60  # a bound for a busy machine
    assert int(np.bincount(row_of, weights=pieces).max()) <= 4096
    assert count * 4096 < 1.01 * pieces.sum()


def test_places_beyond_32_bits(tmp_path: Path) -> None:
    line = Line([3, 2**33 + 5, 4])
    rows = rows_of(line, "best_fit", tmp_path, 2**20)
    # The rest of the long document shares a row with the first, and the whole pieces come after it.
    assert rows.rows_per_epoch == 2**13 + 1
    tokens, labels, positions = rows[2**13]
    assert (int(tokens[0]), int(labels[-1]), int(positions[-1])) == (3 + 2**33 - 2**20, 3 + 2**33, 2**20 - 1)
    tokens, labels, positions = rows_of(line, "documents", tmp_path, 2**20)[2**13 - 2]
    assert int(tokens[0]) == (2**13 - 2) * (2**20 + 1) and positions.equal(torch.arange(2**20))
    assert labels.equal(tokens + 1)
