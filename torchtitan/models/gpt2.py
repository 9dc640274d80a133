"""The GPT-2 family (Radford et al. 2019): sizes, modules, initial weights, operation counts, its Hugging Face twin.

How it is spread, trained or stored is not here: those parts find it through its names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.errors import ConfigError, divisors
from torchtitan.models.attention import CausalMask, InnerAttention
from torchtitan.models.init import Constant, Normal, Rule
from torchtitan.models.spec import MODELS, Divisible, Layout, ModelSpec, Role, Tokenwise
from torchtitan.models.twin import Key, Stored, Transposed, Twin


@dataclass(frozen=True, kw_only=True)
class GPT2Args:
    """Hyper-parameters; the 124M model. The feed-forward width is ``ffn_dim``, or else 4 times ``dim``."""

    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    vocab_size: int = 50257
    max_seq_len: int = 1024
    ffn_dim: int | None = None
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "vocab_size", "max_seq_len", "ffn_dim", "norm_eps", "init_std"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"model.args.{name}", "must be above 0")
        if self.dim % self.n_heads:
            raise ConfigError(
                "model.args.n_heads", f"{self.n_heads} does not divide dim={self.dim}; try {divisors(self.dim)}"
            )

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim


class Embeddings(nn.Module):
    """Tokens and positions ``[batch, seq]`` → the sum of their vectors ``[batch, seq, dim]``."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.dim)
        self.positions = nn.Embedding(args.max_seq_len, args.dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(positions)


class SelfAttention(nn.Module):
    """``[batch, seq, dim]`` → the same; ``allowed`` is what the model's mask module returned."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.inner_attention = InnerAttention()

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.inner_attention(q, k, v, allowed).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """``w2(gelu(w1 x))`` (Hendrycks and Gimpel 2016), by its approximation with tanh or exactly."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim)
        self.w2 = nn.Linear(args.hidden_dim, args.dim)
        self.approximate = "tanh" if args.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate=self.approximate))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream ``[batch, seq, dim]``."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.attention = SelfAttention(args.dim, args.n_heads)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), allowed)
        return x + self.feed_forward(self.ffn_norm(x))


class GPT2(nn.Module):
    """Decoder-only transformer: tokens and positions ``[batch, seq]`` → logits ``[batch, seq, vocab]``."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        # One module: where a later stage lacks it, what stands in its place passes on what the stage before gave.
        self.embeddings = Embeddings(args)
        self.mask = CausalMask()
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_word_embeddings:
            self.output.weight = self.embeddings.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        allowed = self.mask(positions)
        x = self.embeddings(tokens, positions)
        for layer in self.layers.values():
            x = layer(x, allowed)
        return self.output(self.norm(x))


def init_rules(args: GPT2Args) -> Mapping[str, Rule]:
    """Projections into the residual stream start smaller the more of them there are (section 2.3)."""
    scaled = Normal(args.init_std / math.sqrt(2 * args.n_layers))
    return {
        "embeddings.positions.weight": Normal(args.init_std / 2),
        "*norm.weight": Constant(1.0),
        "*.bias": Constant(0.0),
        "layers.*.attention.wo.weight": scaled,
        "layers.*.feed_forward.w2.weight": scaled,
        "*": Normal(args.init_std),
    }


def flops(args: GPT2Args, seq_len: int) -> Tokenwise:
    """Six operations per weight beside the embeddings and token, and the two products of attention."""
    dim, hidden = args.dim, args.hidden_dim
    block = 4 * dim * (dim + 1) + dim * hidden + hidden + hidden * dim + dim + 4 * dim
    weights = args.n_layers * block + 2 * dim + dim * args.vocab_size
    return Tokenwise(weights=6.0 * weights, attention=6.0 * args.n_layers * 2 * dim * seq_len)


ROLES: Mapping[str, Role] = {
    "embeddings.*": "embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.w[qkv]": "column",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "norm",
    "output": "head",
}

FLAVORS = {
    "debugmodel": GPT2Args(dim=256, n_layers=6, n_heads=8, vocab_size=2048, max_seq_len=2048),
    "124M": GPT2Args(),
    "355M": GPT2Args(dim=1024, n_layers=24, n_heads=16),
    "774M": GPT2Args(dim=1280, n_layers=36, n_heads=20),
    "1558M": GPT2Args(dim=1600, n_layers=48, n_heads=25),
}


def tensors(args: GPT2Args) -> Mapping[str, Stored]:
    """Linear maps of blocks are stored ``[in, out]``, those of queries, keys and values as one."""
    modules = {
        "h.*.ln_1": ["layers.*.attention_norm"],
        "h.*.attn.c_attn": [f"layers.*.attention.{w}" for w in ("wq", "wk", "wv")],
        "h.*.attn.c_proj": ["layers.*.attention.wo"],
        "h.*.ln_2": ["layers.*.ffn_norm"],
        "h.*.mlp.c_fc": ["layers.*.feed_forward.w1"],
        "h.*.mlp.c_proj": ["layers.*.feed_forward.w2"],
        "ln_f": ["norm"],
    }
    return {
        "transformer.wte.weight": Stored(["embeddings.tokens.weight"]),
        "transformer.wpe.weight": Stored(["embeddings.positions.weight"]),
        **{
            f"transformer.{theirs}.{kind}": Stored([f"{module}.{kind}" for module in ours], Transposed())
            for theirs, ours in modules.items()
            for kind in ("weight", "bias")
        },
        "lm_head.weight": Stored(["output.weight"]),
    }


TWIN = Twin(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    tensors=tensors,
    keys={
        "vocab_size": Key("vocab_size"),
        "n_positions": Key("max_seq_len"),
        "n_embd": Key("dim"),
        "n_layer": Key("n_layers"),
        "n_head": Key("n_heads"),
        "n_inner": Key("ffn_dim", None, written_from="hidden_dim"),
        "activation_function": Key(
            "activation", "gelu_new", words={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
        ),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tie_word_embeddings", True),
        "initializer_range": Key("init_std", 0.02),
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    # Their older files keep masks among the tensors, and lack the prefix.
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    prefix="transformer.",
    dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
)

MODELS.register(
    "gpt2",
    ModelSpec(
        cls=GPT2,
        args_cls=GPT2Args,
        flavors=FLAVORS,
        layout=Layout(stem=("embeddings",), blocks="layers", head=("norm", "output")),
        init=init_rules,
        flops=flops,
        roles=ROLES,
        divisible=lambda args: Divisible(heads=args.n_heads, kv_heads=args.n_heads, hidden=args.hidden_dim),
        tied=lambda args: {"output.weight": "embeddings.tokens.weight"} if args.tie_word_embeddings else {},
        max_seq_len=lambda args: args.max_seq_len,
        huggingface=TWIN,
    ),
)
