"""Sizes of the Llama 3 family, and what its modules promise."""

import dataclasses
import resource
import time

import pytest
import torch

from torchtitan.errors import ConfigError
from torchtitan.models.decoder import flops
from torchtitan.models.layers import RopeScaling
from torchtitan.models.llama3 import FLAVORS, Llama3, Llama3Args
from torchtitan.models.spec import MODELS

SMALL = Llama3Args(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=101, multiple_of=16)


def test_widths_of_the_feed_forward() -> None:
    widths = {flavor: args.hidden_dim for flavor, args in FLAVORS.items()}
    assert widths == {"debugmodel": 768, "1B": 8192, "3B": 8192, "8B": 14336, "70B": 28672, "405B": 53248}


def test_operations_per_token() -> None:
    args = FLAVORS["8B"]
    counted = flops(args, 8192)
    # 6 per parameter outside the embedding; scores and values of 32 heads of 128 over 8,192 keys in 32 layers.
    assert counted.weights == 6 * (8_030_261_248 - 128256 * 4096)
    assert counted.attention == 6 * 32 * 32 * (128 + 128) * 8192
    assert counted.full - counted.causal == counted.attention / 2
    # A tied head multiplies all the same.
    tied = flops(FLAVORS["1B"], 1)
    assert tied.weights == 6 * 1_235_814_400


def test_building_70b_on_meta_costs_next_to_nothing() -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    model = MODELS.get("llama3").build_meta(FLAVORS["70B"])
    assert time.perf_counter() - start < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 1.0
    assert all(p.is_meta for p in model.parameters())


def test_names_are_the_contract() -> None:
    names = dict(Llama3(SMALL).named_parameters())
    block = [
        *(f"attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
        "attention_norm.weight",
        "ffn_norm.weight",
    ]
    expected = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in block}
    assert set(names) == expected
    assert not list(Llama3(SMALL).buffers())


def test_a_tied_head_is_one_parameter() -> None:
    model = Llama3(dataclasses.replace(SMALL, tie_word_embeddings=True))
    assert "output.weight" not in dict(model.named_parameters())
    assert model.output.weight is model.tok_embeddings.weight


def test_logits_depend_on_the_past_and_on_relative_positions_only() -> None:
    torch.manual_seed(0)
    model = Llama3(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    tokens = torch.randint(101, (1, 16))
    positions = torch.arange(16)[None]
    logits = model(tokens, positions)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 101
    other = model(changed, positions)
    torch.testing.assert_close(other[:, :10], logits[:, :10])
    assert (other[:, 10:] - logits[:, 10:]).abs().amax() > 1e-3
    torch.testing.assert_close(model(tokens, positions + 5), logits, atol=1e-4, rtol=1e-4)
    assert (model(tokens, positions * 2) - logits).abs().amax() > 1e-3


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"n_kv_heads": 3}, "model.args.n_kv_heads"),
        ({"n_heads": 5, "n_kv_heads": 5}, "model.args.n_heads"),
        ({"head_dim": 7}, "model.args.head_dim"),
        ({"n_layers": 0}, "model.args.n_layers"),
        ({"vocab_size": -1}, "model.args.vocab_size"),
        ({"ffn_dim": 0}, "model.args.ffn_dim"),
        ({"ffn_dim_multiplier": -1.0}, "model.args.ffn_dim_multiplier"),
        ({"norm_eps": float("nan")}, "model.args.norm_eps"),
        ({"init_std": -0.1}, "model.args.init_std"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(SMALL, **change)
    assert refused.value.key == key


def test_impossible_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="high_freq_factor"):
        RopeScaling(low_freq_factor=4.0, high_freq_factor=4.0)
