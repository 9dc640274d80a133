"""Rows to validate on: every token but the first predicted once, and rounds that begin at the same row each time."""

import itertools
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.data.test_tokens import opened
from torchtitan.data.batch import IGNORE_INDEX
from torchtitan.data.loader import build_loader
from torchtitan.data.rows.build import Packing, build_rows_once
from torchtitan.data.rows.validation import Rounds, WindowsOnce
from torchtitan.errors import ConfigError


def rows_of(folder: Path, length: int, seq_len: int) -> WindowsOnce:
    """Rows over `length` tokens; below 128 of them each token is its own place."""
    text = "".join(chr(i % 128) for i in range(length))
    return WindowsOnce(opened(folder, [text], bos_id=None, eos_id=None), seq_len=seq_len)


@pytest.mark.parametrize("length", [2, 3, 5, 6, 7, 11, 127])
@pytest.mark.parametrize("seq_len", [1, 5, 200])
def test_every_token_but_the_first_is_predicted_once_from_the_one_before_it(
    tmp_path: Path, length: int, seq_len: int
) -> None:
    rows = rows_of(tmp_path, length, seq_len)
    predicted = []
    for row in range(len(rows)):
        tokens, labels, positions = rows[row]
        assert tokens.shape == labels.shape == positions.shape == (seq_len,)
        assert {t.dtype for t in (tokens, labels, positions)} == {torch.int64}
        assert positions.tolist() == list(range(seq_len))
        valid = labels != IGNORE_INDEX
        assert labels[valid].equal(tokens[valid] + 1)
        predicted += labels[valid].tolist()
    assert predicted == list(range(1, length))


def test_the_last_row_is_filled_up(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 7, 4)
    tokens, labels, _ = rows[1]
    assert tokens.tolist() == [4, 5, 0, 0] and labels.tolist() == [5, 6, IGNORE_INDEX, IGNORE_INDEX]
    for outside in (-1, 2):
        with pytest.raises(IndexError):
            rows[outside]


DOCUMENTS = ["ab", "", "c", "defghijklmnopq", "rs", "", "t"]


@pytest.mark.parametrize("packing", ["concat", "documents", "best_fit"])
@pytest.mark.parametrize("seq_len", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("marked", [True, False], ids=["with BOS and EOS", "as it lies"])
def test_every_label_of_a_packing_comes_once_behind_what_it_may_see(
    tmp_path: Path, packing: Packing, seq_len: int, marked: bool
) -> None:
    special = {} if marked else {"bos_id": None, "eos_id": None}
    tokens = opened(tmp_path, DOCUMENTS, **special)
    ids, documents = tokens.window(0, len(tokens)).tolist(), tokens.documents
    starts = {0} if packing == "concat" else {*documents.starts(0, len(documents)).tolist()} - {len(ids)}
    table = build_rows_once(tokens, packing=packing, seq_len=seq_len, cache_folder=str(tmp_path))
    rows = table(None)
    for most in (1, 2, len(rows), len(rows) + 1):
        first = table(most)
        assert len(first) == min(most, len(rows)) and (first.fingerprint == rows.fingerprint) == (most >= len(rows))
        assert all(a.equal(b) for row in range(len(first)) for a, b in zip(first[row], rows[row], strict=True))
    predicted = []
    for row in range(len(rows)):
        tokens_of, labels, positions = (t.tolist() for t in rows[row])
        for place, label in enumerate(labels):
            if label == IGNORE_INDEX:
                continue
            seen = positions[place] + 1
            # Which place of the data it is: what is seen and the label stand there, in one document.
            piece = [*tokens_of[place - seen + 1 : place + 1], label]
            assert [positions[p] for p in range(place - seen + 1, place + 1)] == list(range(seen))
            found = [
                i
                for i in range(len(ids))
                if ids[i : i + seen + 1] == piece and not starts & {*range(i + 1, i + seen + 1)}
            ]
            assert found
            predicted.append(label)
    assert Counter(predicted) == Counter(ids[i] for i in range(len(ids)) if i not in starts)


def test_a_single_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training.dataset_path: .*single token"):
        rows_of(tmp_path, 1, 4)


def test_fingerprints_tell_data_and_length_apart(tmp_path: Path) -> None:
    found = {rows_of(tmp_path, length, seq_len).fingerprint for length, seq_len in [(9, 4), (8, 4), (9, 5), (9, 4)]}
    assert len(found) == 3


def first_labels(rounds: Rounds, rows: range) -> list[int]:
    return [int(rounds[row][1][0]) for row in rows]


def test_rounds_repeat_and_each_set_begins_a_batch(tmp_path: Path) -> None:
    sets = [rows_of(tmp_path, 9, 2), rows_of(tmp_path, 4, 2)]
    rounds = Rounds(sets, batch_size=3)
    assert rounds.batches == [2, 1]
    one = [1, 3, 5, 7, IGNORE_INDEX, IGNORE_INDEX, 1, 3, IGNORE_INDEX]
    assert first_labels(rounds, range(27)) == one * 3
    assert first_labels(rounds, range(9 * 10**15, 9 * 10**15 + 9)) == one
    filler = rounds[4]
    assert (filler[1] == IGNORE_INDEX).all() and filler[2].tolist() == [0, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_round_after_round_to_each_rank(tmp_path: Path, num_workers: int) -> None:
    rounds = pickle.loads(pickle.dumps(Rounds([rows_of(tmp_path, 15, 2)], batch_size=6)))
    taken = []
    for rank in range(3):
        loader = build_loader(
            rounds, global_batch_size=6, ranks=3, rank=rank, local_batch_size=2, num_workers=num_workers
        )
        taken.append([batch.labels[:, 0].tolist() for (batch,) in itertools.islice(loader, 6)])
        loader.close()
    full, rest = [[1, 3], [5, 7], [9, 11]], [[13, IGNORE_INDEX], [IGNORE_INDEX] * 2, [IGNORE_INDEX] * 2]
    assert taken == [[a, b] * 3 for a, b in zip(full, rest, strict=True)]
