"""The dense models of the Qwen2 and Qwen2.5 families (Qwen2.5 Technical Report, 2024, section 2): defaults and sizes.

Its modules, initial weights and tables are those of ``decoder.py``; mixtures of experts are not here.
"""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder, DecoderArgs, decoder_spec
from torchtitan.models.decoder_twin import decoder_twin
from torchtitan.models.spec import MODELS


@dataclass(frozen=True, kw_only=True)
class Qwen2Args(DecoderArgs):
    """The 7B model."""

    pairs = "halves"
    qkv_bias = True

    dim: int = 3584
    n_layers: int = 28
    n_heads: int = 28
    n_kv_heads: int | None = 4
    vocab_size: int = 152064
    ffn_dim: int | None = 18944
    norm_eps: float = 1e-6
    rope_theta: float = 1e6


class Qwen2(Decoder):
    """Queries, keys and values have a bias, no other linear map has one."""


def _small(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> Qwen2Args:
    """Those of few parameters tie the head to an embedding of fewer rows, and have two heads of keys and values."""
    return Qwen2Args(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=2,
        vocab_size=151936,
        ffn_dim=ffn_dim,
        tie_word_embeddings=True,
    )


def _large(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> Qwen2Args:
    return Qwen2Args(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=8, ffn_dim=ffn_dim, norm_eps=1e-5)


FLAVORS = {
    "debugmodel": Qwen2Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=2, vocab_size=2048, ffn_dim=768, tie_word_embeddings=True
    ),
    "0.5B": _small(896, 24, 14, 4864),
    "1.5B": _small(1536, 28, 12, 8960),
    "3B": _small(2048, 36, 16, 11008),
    "7B": Qwen2Args(),
    "14B": _large(5120, 48, 40, 13824),
    "32B": _large(5120, 64, 40, 27648),
    "72B": _large(8192, 80, 64, 29568),
}

TWIN = decoder_twin("qwen2", "Qwen2ForCausalLM", fixed={"use_sliding_window": False}, max_position_embeddings=131072)

MODELS.register("qwen2", decoder_spec(Qwen2, Qwen2Args, FLAVORS, TWIN))
