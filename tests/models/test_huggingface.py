"""What files of the Hugging Face library hold beside a model, and what is said of keys that cannot be had."""

import dataclasses
from typing import Any

import pytest
import torch

from torchtitan.errors import ConfigError
from torchtitan.models import huggingface
from torchtitan.models.huggingface import (
    TensorTable,
    family_of,
    from_config,
    from_huggingface,
    to_config,
    to_huggingface,
)
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


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", value) for value in (None, "8", 1.5, True, [], {}, float("nan"), -1, 0, 10**400, {1})),
        *(("rms_norm_eps", value) for value in (None, "1e-5", True, [], float("nan"), 10**400)),
        *(("tie_word_embeddings", value) for value in (None, "x", 0, 1.5, [])),
        *(("rope_theta", value) for value in (None, "8", True, [1], -1.0, float("nan"))),
        *(("rope_scaling", value) for value in (0, [], "llama3", [1], 3.0, {"factor": {1}})),
        *(("rope_parameters", value) for value in (0, [], "llama3")),
        *(("layer_types", value) for value in (3, "full_attention", [None, 3], [["full_attention"]])),
        *(("attention_dropout", value) for value in ("x", True, [0.1])),
        ("hidden_act", torch.ones(2, 2)),
        ("attention_bias", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", True),
        ("head_dim", 7),
        ("intermediate_size", None),
    ],
)
def test_a_value_that_cannot_be_is_told_by_their_name(key: str, value: Any) -> None:
    spec = MODELS.get("llama3")
    with pytest.raises(ConfigError) as refused:
        from_config(spec, to_config(spec, spec.flavors["debugmodel"]) | {key: value})
    line = str(refused.value)
    shown = repr(value).split("\n")[0][:40]
    assert line.startswith(f"config.json: {key}={shown}") and "\n" not in line and len(line) < 300


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in [*LLAMA3, "rope_theta"] for value in (0, "8", True) if key != "rope_type"),
        *((key, value) for key in [*LLAMA3, "rope_theta"] for value in ([1], {})),
        ("partial_rotary_factor", True),
    ],
)
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_a_value_of_a_table_of_rotary_positions_that_cannot_be(table: str, key: str, value: Any) -> None:
    spec = MODELS.get("llama3")
    config = to_config(spec, spec.flavors["debugmodel"]) | {table: {**LLAMA3, key: value}}
    del config["rope_theta"]
    with pytest.raises(ConfigError) as refused:
        from_config(spec, config)
    assert str(refused.value).startswith("config.json: ") and f"{key}={value!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3}, "contradicts rope_scaling={"),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 4.0}}, "contradicts rope_scaling={"),
        ({"rope_theta": 77.0, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta=77.0 contradicts"),
        ({"rope_scaling": {**LLAMA3, "type": "default"}}, "rope_type='llama3' contradicts 'default'"),
    ],
)
def test_keys_that_contradict_each_other(change: dict[str, Any], words: str) -> None:
    spec = MODELS.get("llama3")
    with pytest.raises(ConfigError) as refused:
        from_config(spec, to_config(spec, spec.flavors["debugmodel"]) | change)
    assert words in str(refused.value)
    # Said twice alike, it is said once.
    both = {"rope_theta": 500000, "rope_parameters": LLAMA3 | {"rope_theta": 5e5, "factor": 8}, "rope_scaling": LLAMA3}
    args = from_config(spec, to_config(spec, spec.flavors["debugmodel"]) | both)
    assert (args.rope_theta, args.rope_scaling_args) == (5e5, RopeScaling())


@pytest.mark.parametrize("config", [None, [1], "gpt2", {3: 4}, {"model_type": "gpt2", None: 1}])
def test_what_is_no_config(config: Any) -> None:
    for read in (family_of, lambda table: from_config(MODELS.get("gpt2"), table)):
        with pytest.raises(ConfigError, match=r"^config.json: .*, not of type"):
            read(config)


@pytest.mark.parametrize("model_type", [["gpt2"], {}])
def test_a_model_type_that_is_no_word(model_type: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config.json: model_type=.* is no family"):
        family_of({"model_type": model_type})


@pytest.mark.parametrize("word", [["gelu"], {}])
def test_an_activation_that_is_no_word(word: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config.json: activation_function="):
        from_config(MODELS.get("gpt2"), GPT2_CONFIG | {"activation_function": word})


BIAS = "transformer.ln_f.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ln_f.bias": torch.zeros(32)}, f"ln_f.bias is there as {BIAS} as well"),
        *(({BIAS: value}, f"{BIAS} is of type") for value in (None, [0.0] * 32, torch.zeros(32).numpy())),
        *(
            ({BIAS: torch.zeros(32).to(dtype)}, f"{BIAS} is {dtype}")
            for dtype in (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
        ),
        ({BIAS: torch.zeros(32).to_sparse()}, "torch.sparse_coo"),
        ({3: torch.zeros(32)}, "3 must be a name, not of type int"),
        ({"a\nb": torch.zeros(32)}, r"a\nb is not a tensor"),
    ],
)
def test_tensors_that_are_no_weights(change: dict[Any, Any], words: str) -> None:
    spec = MODELS.get("gpt2")
    args = from_config(spec, GPT2_CONFIG)
    theirs = to_huggingface(spec, args, dict(spec.cls(args).named_parameters()))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        halves = from_huggingface(spec, args, theirs | {BIAS: torch.zeros(32, dtype=dtype)})
        assert halves["norm.bias"].dtype is dtype
    with pytest.raises(ConfigError) as refused:
        from_huggingface(spec, args, theirs | change)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("state", [None, [("a", 1)]])
def test_tensors_that_have_no_names(state: Any) -> None:
    spec = MODELS.get("gpt2")
    args = from_config(spec, GPT2_CONFIG)
    for convert in (to_huggingface, from_huggingface):
        with pytest.raises(ConfigError, match=r"^tensors: must be a table"):
            convert(spec, args, state)
    with pytest.raises(ConfigError, match="3 is not the name of a tensor"):
        TensorTable(spec, args).load(3, torch.ones(1))  # type: ignore[arg-type]


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
