"""Token files and orders as datatrove 0.10.1 and megatron-core 0.16.1 gave them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.test_foreign_order import ordered
from tests.data.token_files import source, starts
from torchtitan.data.tokens.datatrove import DsWriter, read_metadata
from torchtitan.data.tokens.megatron import IndexedWriter

CASES = ("one_epoch", "three_epochs", "split_train", "split_valid")


@pytest.fixture
def nanoset(shared: Path) -> Path:
    return shared / "compat/datatrove/00000_unshuffled.ds"


@pytest.fixture
def megatron(shared: Path) -> Path:
    return shared / "compat/megatron/c4_60_text_document"


def test_tokens_are_theirs(shared: Path, nanoset: Path, megatron: Path) -> None:
    expected = json.loads((shared / "compat/datatrove/expected.json").read_text())
    lengths = json.loads((shared / "compat/megatron/expected.json").read_text())["sequence_lengths"]
    found = [source("nanoset", nanoset).open(2001), source("megatron", megatron).open(2001)]
    for tokens in found:
        ids = tokens.window(0, len(tokens))
        facts = expected["files"]["00000_unshuffled.ds"]
        assert (len(ids), ids.max(), ids.sum()) == (facts["tokens"], facts["max_id"], facts["sum_of_ids"])
        assert ids[:8].tolist() == facts["first_8"] and ids[-8:].tolist() == facts["last_8"]
        assert np.diff([*starts(tokens), len(ids)]).tolist() == lengths
    assert found[0].window(0, len(found[0])).tolist() == found[1].window(0, len(found[1])).tolist()


def test_files_are_theirs_byte_by_byte(tmp_path: Path, nanoset: Path, megatron: Path) -> None:
    tokens = source("nanoset", nanoset).open(2001)
    edges = [*starts(tokens), len(tokens)]
    said = read_metadata(nanoset)
    assert said is not None
    writers = [DsWriter(tmp_path / nanoset.name, "<u2", said[0]), IndexedWriter(tmp_path / megatron.name, "<u2")]
    for writer in writers:
        for begin, end in itertools.pairwise(edges):
            writer.add(tokens.window(begin, end - begin), np.array([end - begin]))
        writer.finish()
    written = sorted(p.name for p in tmp_path.iterdir())
    assert len(written) == 5
    for name in written:
        theirs = (nanoset if name.startswith("0") else megatron).with_name(name)
        assert (tmp_path / name).read_bytes() == theirs.read_bytes(), name


@pytest.mark.parametrize("name", CASES)
def test_order_is_that_of_gpt_dataset(shared: Path, megatron: Path, name: str) -> None:
    case: dict[str, Any] = json.loads((shared / "compat/megatron/gpt_dataset_expected.json").read_text())["cases"][name]
    rows = ordered(
        [source("megatron", megatron, split=case["split"], part=case["which"], order_seed=case["seed"])],
        None,
        vocab_size=2001,
        seq_len=case["sequence_length"],
        samples=case["num_samples_asked"],
    )
    own = rows._rows["0"]
    tables = own.tables
    assert len(own) == case["length"]
    assert tables["documents"].tolist() == case["document_index"]
    assert tables["shuffled"].tolist() == case["shuffle_index"]
    assert list(tables["samples"].shape) == case["sample_index_shape"]
    assert tables["samples"][:12].tolist() == case["sample_index_first_12"]
    assert tables["samples"][-3:].tolist() == case["sample_index_last_3"]
    for k, sample in enumerate(case["first_samples"]):
        tokens, labels, positions = rows[k]
        assert (tokens.tolist(), labels.tolist()) == (sample["tokens"], sample["labels"])
        assert positions.equal(torch.arange(case["sequence_length"]))
