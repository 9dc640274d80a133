"""Rows and ids as TorchTitan 0.2.2 and the tokenizers library gave them."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.data.datasets import DATASETS
from torchtitan.data.loader import build_loader
from torchtitan.data.rows.concat import ConcatRows
from torchtitan.data.tokenizer import TOKENIZERS, resolve_special_ids
from torchtitan.data.tokens.cache import open_tokens
from torchtitan.data.tokens.encode import Encoding


def rows_of(folder: Path, cache: Path) -> ConcatRows:
    tokenizer = TOKENIZERS.bind("hf", {}, key="tokenizer")(str(folder / "tokenizer"))
    source = DATASETS.bind("c4_test", {}, key="data.args")(str(folder / "data"), "raise")
    bos, eos = resolve_special_ids(tokenizer, add_bos=True, add_eos=True, bos_id=None, eos_id=None)
    tokens = open_tokens(source, Encoding(tokenizer, bos, eos), cache_folder=str(cache))
    expected = json.loads((folder / "data_expected.json").read_text())
    assert (bos, eos) == (expected["bos_id"], expected["eos_id"])
    assert len(tokens) == expected["total"]
    assert tokens.window(0, 259).tolist() == expected["document_0_ids"]
    return ConcatRows(tokens, seq_len=64, shuffle=False, seed=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_its_loader(shared: Path, tmp_path: Path, workers: int) -> None:
    """Ten steps of four rows, which pass the end of the data."""
    folder = shared / "compat" / "titan022_dcp"
    expected = load_file(folder / "batches_1_to_10.safetensors")
    loader = build_loader(
        rows_of(folder, tmp_path),
        global_batch_size=4,
        ranks=1,
        rank=0,
        local_batch_size=4,
        num_workers=workers,
    )
    steps = [batch for step in itertools.islice(loader, 10) for batch in step]
    loader.close()
    assert torch.stack([batch.tokens for batch in steps]).equal(expected["inputs"])
    assert torch.stack([batch.labels for batch in steps]).equal(expected["labels"])
