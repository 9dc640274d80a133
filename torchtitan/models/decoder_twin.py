"""The Hugging Face twin of the decoders of ``decoder.py``: one set of names of tensors and keys for all such families.

What a single family refuses or has besides stands in its file.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.twin import AsItIs, Form, Key, RotaryHalves, Stored, Twin


def tensors(args: DecoderArgs) -> Mapping[str, Stored]:
    """Their names of our parameters, the same in all such families; pairs of rotary positions are halves there."""
    form: Form = RotaryHalves(args.attention_dim) if args.pairs == "interleaved" else AsItIs()
    block = {
        "input_layernorm.weight": Stored(["attention_norm.weight"]),
        "self_attn.q_proj.weight": Stored(["attention.wq.weight"], form),
        "self_attn.k_proj.weight": Stored(["attention.wk.weight"], form),
        "self_attn.v_proj.weight": Stored(["attention.wv.weight"]),
        "self_attn.o_proj.weight": Stored(["attention.wo.weight"]),
        "post_attention_layernorm.weight": Stored(["ffn_norm.weight"]),
        "mlp.gate_proj.weight": Stored(["feed_forward.w1.weight"]),
        "mlp.up_proj.weight": Stored(["feed_forward.w3.weight"]),
        "mlp.down_proj.weight": Stored(["feed_forward.w2.weight"]),
    }
    if args.qkv_bias:
        block["self_attn.q_proj.bias"] = Stored(["attention.wq.bias"], form)
        block["self_attn.k_proj.bias"] = Stored(["attention.wk.bias"], form)
        block["self_attn.v_proj.bias"] = Stored(["attention.wv.bias"])
    if args.head_norms:
        block["self_attn.q_norm.weight"] = Stored(["attention.q_norm.weight"], form)
        block["self_attn.k_norm.weight"] = Stored(["attention.k_norm.weight"], form)
    return {
        "model.embed_tokens.weight": Stored(["tok_embeddings.weight"]),
        **{
            f"model.layers.*.{name}": Stored([f"layers.*.{part}" for part in stored.parts], stored.form)
            for name, stored in block.items()
        },
        "model.norm.weight": Stored(["norm.weight"]),
        "lm_head.weight": Stored(["output.weight"]),
    }


KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("dim"),
    "num_hidden_layers": Key("n_layers"),
    "num_attention_heads": Key("n_heads"),
    "num_key_value_heads": Key("n_kv_heads", None, written_from="kv_heads"),
    "head_dim": Key("head_dim", None, written_from="attention_dim"),
    "intermediate_size": Key("ffn_dim", written_from="hidden_dim"),
    "rms_norm_eps": Key("norm_eps", 1e-6),
    "tie_word_embeddings": Key("tie_word_embeddings", False),
    "initializer_range": Key("init_std", 0.02),
}
"""Keys of a ``config.json`` that all such families have."""


def decoder_twin(
    model_type: str,
    architecture: str,
    *,
    fixed: Mapping[str, Any],
    max_position_embeddings: int,
    keys: Mapping[str, Key] = KEYS,
) -> Twin:
    """The twin of a family whose only values of some keys are ``fixed``; ``max_position_embeddings`` is written for
    others to read, since rotary positions have no end."""
    return Twin(
        model_type=model_type,
        architecture=architecture,
        tensors=tensors,
        keys=keys,
        fixed={"hidden_act": "silu", **fixed},
        written={"max_position_embeddings": max_position_embeddings},
        rotary=True,
        ignored=("*.rotary_emb.inv_freq",),
        dropout=("attention_dropout",),
    )
