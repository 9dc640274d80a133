"""Logits, loss and gradients of models that transformers made and ran, from its files."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from torchtitan.models.huggingface import TensorTable, family_of, from_config, from_huggingface, to_config
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import MODELS


@pytest.mark.parametrize("spelling", ["config.json", "config.transformers-4.57.6.json"])
@pytest.mark.parametrize("peer", ["hf_llama", "hf_qwen3"])
def test_its_numbers_from_its_files(shared: Path, peer: str, spelling: str) -> None:
    folder = shared / "compat" / peer
    config = json.loads((folder / spelling).read_text())
    expected = json.loads((folder / "expected.json").read_text())
    peers = load_file(folder / "expected.safetensors")
    spec = MODELS.get(family_of(config))
    args = from_config(spec, config)
    model = spec.cls(args)
    model.load_state_dict(from_huggingface(spec, args, load_file(folder / "model.safetensors")), strict=False)
    table = TensorTable(spec, args)
    assert {name: list(table.store(name, model.state_dict()).shape) for name in table.stored} == (
        expected["tensors_on_disk"]
    )
    tokens = peers["input_ids"]
    logits = model(tokens, torch.arange(48).expand(2, -1))
    torch.testing.assert_close(logits, peers["logits"], atol=2e-5, rtol=0.0)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norms = {name: table.store(name, gradients).norm().item() for name in table.stored}
    assert norms == pytest.approx(expected["param_grad_norms"], rel=1e-5)


def test_scaling_of_rotary_positions_is_read(shared: Path) -> None:
    configs = [
        json.loads((shared / "compat" / "hf_llama" / name).read_text())
        for name in ("config.json", "config.transformers-4.57.6.json")
    ]
    spec = MODELS.get("llama3")
    both = [from_config(spec, config) for config in configs]
    assert both[0] == both[1]
    assert both[0].rope_scaling_args == RopeScaling(8.0, 1.0, 4.0, 64) and both[0].rope_theta == 10000.0
    # Written once more, it is what version 4 wrote.
    written = to_config(spec, both[0])
    assert all(configs[1][key] == value for key, value in written.items() if key != "max_position_embeddings")
    table = dict(written["rope_scaling"])
    older = configs[1] | {"rope_scaling": {"type": table.pop("rope_type"), **table}}
    assert from_config(spec, older) == both[0]
