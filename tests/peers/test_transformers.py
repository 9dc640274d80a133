"""Every family against its twin in the transformers library, on one and the same weights.

The library builds its model from our configuration and loads our exported tensors strictly.
"""

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan.models.huggingface import TensorTable, from_config, to_config, to_huggingface
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import MODELS

WITH_TWIN = [name for name in MODELS.names() if MODELS.get(name).huggingface is not None]
# What of it a family has: heads larger than dim / n_heads, groups of heads, stretched rotary positions, an odd width.
SIZES: dict[str, Any] = {
    "dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "ffn_dim": 72,
    "max_seq_len": 64,
    "rope_theta": 10000.0,
    "rope_scaling_args": RopeScaling(8.0, 1.0, 4.0, 32),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WITH_TWIN)
def test_the_same_numbers_from_the_same_weights(name: str, tied: bool) -> None:
    spec = MODELS.get(name)
    known = {field.name for field in dataclasses.fields(spec.args_cls)}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    args = dataclasses.replace(spec.flavors["debugmodel"], tie_word_embeddings=tied, **sizes)
    torch.manual_seed(0)
    model = spec.cls(args)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            # Norms near one, all else wide enough for attention to be far from uniform.
            p.normal_(std=0.2).add_(float("norm.weight" in parameter))

    config = to_config(spec, args)
    written = json.loads(json.dumps(config))  # what is passed to them they change
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written), attn_implementation="sdpa").float()
    assert type(theirs).__name__ == config["architectures"][0]
    exported = to_huggingface(spec, args, model.state_dict())
    absent = theirs.load_state_dict(exported, strict=False)
    assert absent.unexpected_keys == [] and set(absent.missing_keys) == set(TensorTable(spec, args).optional)
    theirs.tie_weights()
    # And what it would write of itself is read as the same model.
    assert to_config(spec, from_config(spec, theirs.config.to_dict())) == config

    tokens = torch.randint(args.vocab_size, (2, 40))
    logits = model(tokens, torch.arange(40).expand(2, -1))
    peers = theirs(tokens).logits
    assert logits.std() > 0.5
    torch.testing.assert_close(logits, peers, atol=1e-5 * float(peers.detach().abs().max()), rtol=0.0)
    losses = [F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for out in (logits, peers)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    gradients = {parameter: p.grad for parameter, p in model.named_parameters() if p.grad is not None}
    norms = {key: t.norm().item() for key, t in to_huggingface(spec, args, gradients).items()}
    expected = {key: p.grad.norm().item() for key, p in theirs.named_parameters() if p.grad is not None}
    # A bias of keys moves all scores of a query alike: its gradient is rounding.
    largest = max(expected.values())
    assert norms == pytest.approx(expected, rel=1e-5, abs=1e-6 * largest)
