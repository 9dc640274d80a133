"""The dense models of the Qwen3 family (Qwen3 Technical Report, 2025, section 2): defaults and sizes.

Its modules, initial weights and tables are those of ``decoder.py``; mixtures of experts are not here.
"""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder, DecoderArgs, decoder_spec
from torchtitan.models.decoder_twin import KEYS, decoder_twin
from torchtitan.models.spec import MODELS
from torchtitan.models.twin import Key


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(DecoderArgs):
    """The 8B model."""

    pairs = "halves"
    head_norms = True

    dim: int = 4096
    n_layers: int = 36
    n_heads: int = 32
    n_kv_heads: int | None = 8
    head_dim: int | None = 128
    vocab_size: int = 151936
    ffn_dim: int | None = 12288
    norm_eps: float = 1e-6
    rope_theta: float = 1e6


class Qwen3(Decoder):
    """Each head of queries and keys passes a norm before it is rotated, and is as large as one likes."""


FLAVORS = {
    "debugmodel": Qwen3Args(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=64,
        vocab_size=2048,
        ffn_dim=768,
        tie_word_embeddings=True,
    ),
    "0.6B": Qwen3Args(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tie_word_embeddings=True),
    "1.7B": Qwen3Args(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tie_word_embeddings=True),
    "4B": Qwen3Args(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, tie_word_embeddings=True),
    "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, ffn_dim=12288),
    "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, ffn_dim=17408),
    "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, ffn_dim=25600),
}

TWIN = decoder_twin(
    "qwen3",
    "Qwen3ForCausalLM",
    fixed={"attention_bias": False, "use_sliding_window": False},
    max_position_embeddings=40960,
    keys=KEYS | {"head_dim": Key("head_dim", 128, written_from="attention_dim")},
)

MODELS.register("qwen3", decoder_spec(Qwen3, Qwen3Args, FLAVORS, TWIN))
