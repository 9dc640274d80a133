"""datatrove and megatron-core themselves, where they are installed (0.10.1 and 0.16.1 are what this was tried with):
they read what is written here, and give the samples that are given here."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import NO_TOKEN_PROGRAMS
from tests.data.test_foreign_order import ordered
from tests.data.token_files import ds, indexed, source

pytestmark = [
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("datatrove", "megatron")), reason=NO_TOKEN_PROGRAMS
    ),
    pytest.mark.filterwarnings("ignore"),
]
SEQ_LEN = 16


def documents(seed: int, number: int, largest: int = 90) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 1000, int(random.integers(1, largest))).tolist() for _ in range(number)]


def gpt_datasets(prefixes: list[Path], weights: list[float] | None, samples: int, split: str) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=99,
        sequence_length=SEQ_LEN,
        blend=([str(prefix) for prefix in prefixes], weights),
        split=split,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=1000, unique_identifiers={}),
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 20, 0], lambda: True, config).build()


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_reads_what_is_written(tmp_path: Path, dtype: str) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    written = documents(0, 20)
    theirs = IndexedDataset(str(indexed(tmp_path / "x", [[], *written, []], dtype)))
    assert [theirs[k].tolist() for k in range(len(theirs))] == written
    assert theirs.document_indices.tolist() == [0, *range(21), 20]


@pytest.mark.parametrize(
    ("weights", "samples"), [([0.1, 0.5, 0.4], 300), ([7.0, 2.0, 1.0], 500), ([1.0, 1.0, 1.0], 64), ([1.0], 1000)]
)
def test_samples_are_those_of_megatron(tmp_path: Path, weights: list[float], samples: int) -> None:
    prefixes = [indexed(tmp_path / f"{k}", documents(k, 25 + 5 * k)) for k in range(len(weights))]
    theirs = gpt_datasets(prefixes, weights, samples, "90,10,0")
    for part, dataset, number in (("train", theirs[0], samples), ("valid", theirs[1], 20)):
        sources = [source("megatron", prefix, split="90,10,0", part=part, order_seed=99) for prefix in prefixes]
        rows = ordered(sources, weights, vocab_size=1000, seq_len=SEQ_LEN, samples=number)
        for k in range(number):
            assert dataset[k]["tokens"].tolist() == rows[k][0].tolist(), (part, k)
            assert dataset[k]["labels"].tolist() == rows[k][1].tolist(), (part, k)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_datatrove_reads_what_is_written(tmp_path: Path, dtype: str) -> None:
    from datatrove.utils.dataset import DatatroveFolderDataset

    for k in range(5):
        ds(tmp_path / f"{k}.ds", documents(k, 9), dtype)
    theirs = DatatroveFolderDataset(str(tmp_path), seq_len=SEQ_LEN, shuffle=True, token_size=int(dtype[2]))
    rows = ordered([source("nanoset", tmp_path)], None, vocab_size=1000, seq_len=SEQ_LEN, samples=0)
    order = rows.tables["own"].tolist()
    assert sorted(order) == list(range(len(theirs)))
    for k, window in enumerate(order):
        tokens, labels, _ = rows[k]
        assert theirs[window]["input_ids"].tolist() == [*tokens.tolist(), int(labels[-1])]
