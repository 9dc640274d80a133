"""Decoders with rotary positions, norms before each part and a gated feed-forward, as Llama and Qwen are built.

What sets one family apart, its defaults and sizes, stands in its own file as data; how models are spread, trained or
stored is not here: those parts find them through their names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from torchtitan.errors import ConfigError, divisors
from torchtitan.models.attention import CausalMask
from torchtitan.models.init import Constant, Normal, Rule
from torchtitan.models.layers import Attention, FeedForward, Pairs, RopeScaling, RotaryEmbedding
from torchtitan.models.spec import Divisible, Layout, ModelSpec, Role, Tokenwise
from torchtitan.models.twin import Twin

_POSITIVE = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "ffn_dim", "multiple_of"),
    *("ffn_dim_multiplier", "norm_eps", "rope_theta"),
)


@dataclass(frozen=True, kw_only=True)
class DecoderArgs:
    """Hyper-parameters. The feed-forward width is ``ffn_dim``, or else 8/3 dim times ``ffn_dim_multiplier``
    rounded up to ``multiple_of``. ``rope_scaling_args.scaling_factor = 1`` turns the stretching off.

    A family gives defaults, and says what is not a choice in it: the ``pairs`` that rotary positions turn, whether
    queries, keys and values have a bias (``qkv_bias``), whether each head of queries and keys has a norm
    (``head_norms``), and whether embedding and head start at scales of their own rather than at ``init_std``
    (``scaled_head``).
    """

    pairs: ClassVar[Pairs]
    qkv_bias: ClassVar[bool] = False
    head_norms: ClassVar[bool] = False
    scaled_head: ClassVar[bool] = False

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int
    ffn_dim: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float
    rope_theta: float
    rope_scaling_args: RopeScaling = RopeScaling(scaling_factor=1.0)  # noqa: RUF009 (frozen)
    tie_word_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, "init_std"):
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and name in _POSITIVE):
                raise ConfigError(
                    f"model.args.{name}", "must be above 0" if name in _POSITIVE else "must be at least 0"
                )
        if self.n_heads % self.kv_heads:
            raise ConfigError(
                "model.args.n_kv_heads",
                f"{self.kv_heads} does not divide n_heads={self.n_heads}; try {divisors(self.n_heads)}",
            )
        if self.head_dim is None and self.dim % self.n_heads:
            raise ConfigError(
                "model.args.n_heads",
                f"{self.n_heads} does not divide dim={self.dim}; try {divisors(self.dim)}, or set model.args.head_dim",
            )
        if self.attention_dim < 2 or self.attention_dim % 2:
            raise ConfigError(
                "model.args.head_dim",
                f"{self.attention_dim} is not even, and rotary positions turn pairs of dimensions",
            )

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def attention_dim(self) -> int:
        """Size of one head."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream ``[batch, seq, dim]``."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.attention = Attention(
            args.dim,
            args.n_heads,
            args.kv_heads,
            args.attention_dim,
            pairs=args.pairs,
            bias=args.qkv_bias,
            head_norm_eps=args.norm_eps if args.head_norms else None,
        )
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, allowed)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Decoder-only transformer: tokens and positions ``[batch, seq]`` → logits ``[batch, seq, vocab]``."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.rope = RotaryEmbedding(args.attention_dim, args.rope_theta, args.rope_scaling_args, args.pairs)
        self.mask = CausalMask()
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_word_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rope(positions)
        allowed = self.mask(positions)
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, cos, sin, allowed)
        return self.output(self.norm(x))


def init_rules(args: DecoderArgs) -> Mapping[str, Rule]:
    """Projections back into the residual stream start smaller the deeper they stand, a scaled head at 1 / sqrt(dim)."""
    embedding = head = Normal(args.init_std)
    if args.scaled_head:
        head = Normal(args.dim**-0.5, cut=3.0)
        embedding = head if args.tie_word_embeddings else Normal(1.0)
    rules: dict[str, Rule] = {
        "tok_embeddings.weight": embedding,
        "output.weight": head,
        "*norm.weight": Constant(1.0),
        "layers.*.attention.w[qkv].weight": Normal(args.init_std),
        "layers.*.attention.w[qkv].bias": Constant(0.0),
        "layers.*.feed_forward.w1.weight": Normal(args.init_std),
    }
    for i in range(args.n_layers):
        scaled = Normal(args.init_std / (2 * (i + 1)) ** 0.5)
        for name in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
            rules[f"layers.{i}.{name}.weight"] = scaled
    return rules


def flops(args: DecoderArgs, seq_len: int) -> Tokenwise:
    """Six operations per weight of a matrix product and token, and the two products of attention."""
    query, key_value = args.n_heads * args.attention_dim, args.kv_heads * args.attention_dim
    block = args.dim * (2 * query + 2 * key_value) + 3 * args.dim * args.hidden_dim + 2 * args.dim
    block += (query + 2 * key_value) * args.qkv_bias + 2 * args.attention_dim * args.head_norms
    weights = args.n_layers * block + args.dim + args.dim * args.vocab_size
    return Tokenwise(weights=6.0 * weights, attention=6.0 * args.n_layers * 2 * query * seq_len)


def tied(args: DecoderArgs) -> Mapping[str, str]:
    return {"output.weight": "tok_embeddings.weight"} if args.tie_word_embeddings else {}


ROLES: Mapping[str, Role] = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.w[qkv]": "column",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w[13]": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "norm",
    "output": "head",
}


def divisible(args: DecoderArgs) -> Divisible:
    return Divisible(heads=args.n_heads, kv_heads=args.kv_heads, hidden=args.hidden_dim)


def decoder_spec(
    cls: type[Decoder], args_cls: type[DecoderArgs], flavors: dict[str, Any], huggingface: Twin
) -> ModelSpec:
    """The family of such decoders whose model is ``cls``, hyper-parameters ``args_cls`` and sizes ``flavors``."""
    head_norms: Mapping[str, Role] = {"layers.*.attention.[qk]_norm": "head_norm"} if args_cls.head_norms else {}
    return ModelSpec(
        cls=cls,
        args_cls=args_cls,
        flavors=flavors,
        layout=Layout(stem=("tok_embeddings",), blocks="layers", head=("norm", "output")),
        init=init_rules,
        flops=flops,
        roles={**ROLES, **head_norms},
        divisible=divisible,
        tied=tied,
        huggingface=huggingface,
    )
