import random
from fractions import Fraction

import pytest
import torch

from torchtitan.data.rows.mixture import Mixture, Split, split_fingerprint


class Numbered:
    """Rows that say whose they are and which."""

    seq_len = 2
    rows_per_epoch = 10

    def __init__(self, source: int) -> None:
        self.source = source
        self.fingerprint = f"numbered {source}"

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        there = torch.tensor([self.source, row])
        return there, there, there


def shares(*weights: object) -> dict[str, Fraction]:
    return {f"source {i}": Fraction(str(weight)) for i, weight in enumerate(weights)}


def drawn(kind: str, dice: random.Random) -> dict[str, Fraction]:
    count = dice.choice([1, 2, 3, 5, 17, 60])
    if kind == "alike":
        return shares(*[1] * count)
    if kind == "whole":
        return shares(*[dice.randint(1, 1000) for _ in range(count)])
    return shares(*[f"{10 ** dice.uniform(-5, 3):.6f}1" for _ in range(count)])


class TestSplit:
    @pytest.mark.parametrize("kind", ["alike", "whole", "far apart"])
    def test_every_prefix_is_within_two_of_its_shares(self, kind: str) -> None:
        dice = random.Random(kind)
        for _ in range(12):
            weights = drawn(kind, dice)
            split, total = Split(weights), sum(weights.values())
            counts = dict.fromkeys(weights, 0)
            for n in range(700):
                name, before = split.place(n)
                assert before == counts[name], "the numbers of a name are counted without gaps"
                counts[name] += 1
                assert all(abs(counts[w] - (n + 1) * weights[w] / total) < 2 for w in weights)
                assert n % 50 or split.counts(n + 1) == counts

    def test_a_published_blend(self) -> None:
        split = Split(shares("0.7", "0.2", "0.1"))
        assert [split.place(n)[0][-1] for n in range(20)] == list("01000200100100020010")
        assert split.counts(10**15) == {"source 0": 7 * 10**14, "source 1": 2 * 10**14, "source 2": 10**14}

    def test_only_proportions_count(self) -> None:
        one, other = Split(shares("0.3", "0.7")), Split(shares(6, 14))
        assert [one.place(n) for n in range(100)] == [other.place(n) for n in range(100)]

    @pytest.mark.parametrize("weights", [(), (1, 0), (1, -1)], ids=str)
    def test_weights_are_positive(self, weights: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="positive"):
            Split(shares(*weights))


ROWS = {f"source {i}": Numbered(i) for i in range(3)}


class TestMixture:
    def test_a_source_alone_is_itself(self) -> None:
        mixture = Mixture({"source 1": ROWS["source 1"]}, [(0, {"source 1": Fraction(3)})])
        assert [mixture[i][0].tolist() for i in (0, 1, 10**12)] == [[1, 0], [1, 1], [1, 10**12]]
        assert split_fingerprint({"source 1": Fraction(3)}, ROWS) == "numbered 1"

    def test_sources_go_on_where_they_stood_when_a_stage_begins(self) -> None:
        stages = [
            (0, {"source 0": Fraction(1), "source 1": Fraction(1)}),
            (7, {"source 0": Fraction(1)}),  # of no rows, since the next begins there
            (7, {"source 1": Fraction(1), "source 2": Fraction(2)}),
            (20, {"source 0": Fraction(1), "source 2": Fraction(5)}),
        ]
        mixture = Mixture(ROWS, stages)
        seen = [0, 0, 0]
        for row in range(200):
            source, own = mixture[row][0].tolist()
            assert own == seen[source], "each source gives its rows in order, none twice and none left out"
            assert source in ((0, 1) if row < 7 else (1, 2) if row < 20 else (0, 2))
            seen[source] += 1
            assert list(mixture.counts(row + 1).values()) == seen

    def test_a_negative_row_is_none(self) -> None:
        with pytest.raises(IndexError):
            Mixture(ROWS, [(0, shares(1, 1, 1))])[-1]

    def test_fingerprints_tell_blends_apart(self) -> None:
        blends = [shares(1, 1), shares(1, 2), shares(1, 1, 1), {"source 1": Fraction(1), "source 0": Fraction(1)}]
        assert len({split_fingerprint(blend, ROWS) for blend in blends}) == len(blends)
        assert split_fingerprint(shares(2, 2), ROWS) == split_fingerprint(shares(1, 1), ROWS)
        assert Mixture(ROWS, [(0, blends[0])]).fingerprint != Mixture(ROWS, [(0, blends[1])]).fingerprint
