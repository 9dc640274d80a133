"""What files of the Hugging Face library hold beside a model, and what is said of keys that cannot be had."""

import dataclasses
from typing import Any

import pytest
import torch

from torchtitan.errors import ConfigError
from torchtitan.models import huggingface
from torchtitan.models.huggingface import TensorTable, family_of, from_config, from_huggingface, to_config
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import MODELS
from torchtitan.models.twin import AsItIs, Form, RotaryHalves, Transposed

# As its own repository has it, shortened.
GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "vocab_size": 101,
}


@pytest.mark.parametrize("form", [AsItIs(), Transposed(), RotaryHalves(4)])
@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_forms_are_inverse(form: Form, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    assert torch.equal(form.load(form.store(tensor)), tensor) and torch.equal(form.store(form.load(tensor)), tensor)


def test_rows_of_halves() -> None:
    assert RotaryHalves(4).store(torch.arange(8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_what_was_never_learned_and_a_prefix_that_is_missing() -> None:
    spec = MODELS.get("gpt2")
    args = from_config(spec, GPT2_CONFIG)
    table = TensorTable(spec, args)
    state = dict(spec.cls(args).named_parameters())
    short = {name.removeprefix("transformer."): table.store(name, state) for name in table.stored}
    assert table.stored["transformer.h.1.attn.c_attn.weight"].parts == tuple(
        f"layers.1.attention.{w}.weight" for w in ("wq", "wk", "wv")
    )
    assert short["h.1.attn.c_attn.weight"].shape == (32, 96)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert set(from_huggingface(spec, args, short | masks)) == set(state)
    llama = MODELS.get("llama3")
    tables = TensorTable(llama, llama.flavors["debugmodel"])
    assert tables.load("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)) == {}


def test_dropout_and_unknown_keys_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(huggingface, "note_once", said.append)
    spec = MODELS.get("gpt2")
    args = from_config(spec, GPT2_CONFIG | {"n_embd": 64, "brand_new_trick": 3, "embd_pdrop": 0.25})
    assert args == spec.args_cls(dim=64, n_heads=4, n_layers=2, vocab_size=101, max_seq_len=64)
    dropout, unknown = said
    assert "embd_pdrop=0.25" in dropout and unknown.endswith(": brand_new_trick")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor of rope_type='llama3' is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "twist": 2}}, "twist=2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"vocab_size": ...}, "vocab_size is missing"),
    ],
)
def test_what_cannot_be_had(change: dict[str, Any], words: str) -> None:
    spec = MODELS.get("llama3")
    config = to_config(spec, spec.flavors["debugmodel"]) | change
    with pytest.raises(ConfigError) as refused:
        from_config(spec, {key: value for key, value in config.items() if value is not ...})
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_an_activation_that_is_not_built() -> None:
    with pytest.raises(ConfigError, match="activation_function='relu' is none of"):
        from_config(MODELS.get("gpt2"), GPT2_CONFIG | {"activation_function": "relu"})


def test_keys_that_are_missing_are_what_transformers_makes_of_them() -> None:
    """Llama 2 said neither theta nor key-value heads, and the first models no head_dim."""
    spec = MODELS.get("llama3")
    config = to_config(spec, spec.flavors["debugmodel"])
    for key in ("rope_theta", "rope_scaling", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        del config[key]
    args = from_config(spec, config)
    assert (args.rope_theta, args.kv_heads, args.attention_dim, args.norm_eps) == (10000.0, 16, 16, 1e-6)
    assert args.rope_scaling_args == RopeScaling(scaling_factor=1.0) and not args.tie_word_embeddings


def test_families_without_a_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = dataclasses.replace(MODELS.get("llama3"), huggingface=None)
    with pytest.raises(ConfigError, match="no Hugging Face twin"):
        to_config(alone, alone.flavors["debugmodel"])
    with pytest.raises(ConfigError, match="model_type='bert' is no family here"):
        family_of({"model_type": "bert"})
