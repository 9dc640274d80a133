"""The Llama 3 family (The Llama 3 Herd of Models, section 3.2): defaults and sizes.

Its modules, initial weights and tables are those of ``decoder.py``.
"""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder, DecoderArgs, decoder_spec
from torchtitan.models.decoder_twin import decoder_twin
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import MODELS


@dataclass(frozen=True, kw_only=True)
class Llama3Args(DecoderArgs):
    """The 8B model of Llama 3.1, but for the width of its feed-forward."""

    pairs = "interleaved"
    scaled_head = True

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    vocab_size: int = 128256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_args: RopeScaling = RopeScaling()  # noqa: RUF009 (frozen)


class Llama3(Decoder):
    """Rotary frequencies are stretched, heads of keys and values are shared (Llama 3.1)."""


_LLAMA_32 = RopeScaling(scaling_factor=32.0)

FLAVORS = {
    "debugmodel": Llama3Args(dim=256, n_layers=6, n_heads=16, vocab_size=2048),
    "1B": Llama3Args(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        rope_scaling_args=_LLAMA_32,
        tie_word_embeddings=True,
    ),
    "3B": Llama3Args(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim=8192,
        rope_scaling_args=_LLAMA_32,
        tie_word_embeddings=True,
    ),
    "8B": Llama3Args(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
    "70B": Llama3Args(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    "405B": Llama3Args(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096),
}

TWIN = decoder_twin(
    "llama",
    "LlamaForCausalLM",
    fixed={"attention_bias": False, "mlp_bias": False},
    max_position_embeddings=131072,
)

MODELS.register("llama3", decoder_spec(Llama3, Llama3Args, FLAVORS, TWIN))
