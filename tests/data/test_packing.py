import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.test_tokens import opened
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.rows.rows import permute, round_keys


def rows_of(folder: Path, length: int, seq_len: int, *, shuffle: bool = False, seed: int = 0) -> ConcatRows:
    """Rows over `length` tokens; below 128 of them each token is its own place."""
    text = "".join(chr(i % 128) for i in range(length))
    return ConcatRows(opened(folder, [text], bos_id=None, eos_id=None), seq_len=seq_len, shuffle=shuffle, seed=seed)


def test_windows_follow_each_other_without_overlap(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 12, 3)
    tokens, labels, positions = rows[1]
    assert tokens.tolist() == [4, 5, 6] and labels.tolist() == [5, 6, 7] and positions.tolist() == [0, 1, 2]
    assert {t.dtype for t in (tokens, labels, positions)} == {torch.int64}
    assert rows[0][0].tolist() == [0, 1, 2]


def test_windows_run_on_over_the_end(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 10, 3)
    stream = [i for row in range(5) for i in [*rows[row][0].tolist(), rows[row][1].tolist()[-1]]]
    assert stream == [i % 10 for i in range(20)]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_data_shorter_than_a_window(tmp_path: Path, length: int) -> None:
    for shuffle in (False, True):
        rows = rows_of(tmp_path, length, 8, shuffle=shuffle)
        assert rows.rows_per_epoch == 1
        stream = [i for row in range(3) for i in [*rows[row][0].tolist(), rows[row][1].tolist()[-1]]]
        assert stream == [i % length for i in range(27)]


class TestShuffle:
    def test_an_epoch_takes_each_of_its_windows_once(self, tmp_path: Path) -> None:
        rows = rows_of(tmp_path, 121, 5, shuffle=True)
        n = rows.rows_per_epoch
        assert n == 20
        epochs = [[rows.window_of(e * n + i) for i in range(n)] for e in range(4)]
        for e, epoch in enumerate(epochs):
            assert sorted(epoch) == list(range(e * n, (e + 1) * n))
        orders = {tuple(w % n for w in epoch) for epoch in epochs}
        assert len(orders) == 4 and tuple(range(n)) not in orders

    def test_is_by_the_seed(self, tmp_path: Path) -> None:
        def order(seed: int) -> list[int]:
            rows = rows_of(tmp_path, 121, 5, shuffle=True, seed=seed)
            return [rows.window_of(i) for i in range(40)]

        assert order(0) == order(0) != order(1)

    def test_starts_anywhere_at_once(self, tmp_path: Path) -> None:
        rows = rows_of(tmp_path, 121, 5, shuffle=True)
        window = rows.window_of(10**15 + 3)
        assert window // 20 == (10**15 + 3) // 20
        assert rows[10**15 + 3][0].tolist() == [(window * 6 + i) % 121 for i in range(5)]

    def test_rows_before_the_first_do_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(IndexError):
            rows_of(tmp_path, 121, 5)[-1]


class TestPermute:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 101, 1000, 4096])
    def test_is_a_permutation(self, size: int) -> None:
        for epoch in range(3):
            keys = round_keys(7, epoch)
            assert sorted(permute(i, size, keys) for i in range(size)) == list(range(size))

    def test_no_place_is_favoured(self) -> None:
        size, epochs = 10, 4000
        counts = Counter((i, permute(i, size, round_keys(3, e))) for e in range(epochs) for i in range(size))
        expected = epochs / size
        chi_squared = sum((counts[i, j] - expected) ** 2 / expected for i in range(size) for j in range(size))
        # 81 degrees of freedom: 150 is five standard deviations above their mean.
        assert chi_squared < 150

    def test_neighbours_are_taken_apart(self) -> None:
        size = 10_000
        places = torch.tensor([permute(i, size, round_keys(0, 0)) for i in range(size)], dtype=torch.float64)
        correlation = torch.corrcoef(torch.stack([places[:-1], places[1:]]))[0, 1]
        assert abs(correlation) < 0.05

    def test_needs_no_table(self) -> None:
        size = 10**18
        found = [permute(i, size, round_keys(0, 0)) for i in range(1000)]
        assert len(set(found)) == 1000 and all(0 <= i < size for i in found)
        assert 0.4 < sum(i > size // 2 for i in found) / 1000 < 0.6

    def test_stays_what_it_is(self) -> None:
        """Runs that resume after an update must find the same order."""
        order = [13, 4, 2, 14, 16, 8, 15, 17, 7, 11, 6, 0, 10, 5, 3, 12, 18, 19, 1, 9]
        assert [permute(i, 20, round_keys(0, 0)) for i in range(20)] == order


def test_fingerprint_follows_what_the_rows_depend_on(tmp_path: Path) -> None:
    def fingerprint(length: int = 121, seq_len: int = 5, **options: Any) -> str:
        return rows_of(tmp_path, length, seq_len, **options).fingerprint

    assert fingerprint(seed=1) == fingerprint(seed=2), "unshuffled rows do not depend on the seed"
    different = [fingerprint(), fingerprint(120), fingerprint(seq_len=6), fingerprint(shuffle=True)]
    different.append(fingerprint(shuffle=True, seed=1))
    assert len(set(different)) == len(different)


def test_rows_travel_to_workers(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 121, 5, shuffle=True)
    copy = pickle.loads(pickle.dumps(rows))
    assert copy[33][0].equal(rows[33][0]) and copy.fingerprint == rows.fingerprint
