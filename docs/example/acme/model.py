"""A decoder whose blocks attend and feed forward side by side (PaLM, section 2), under one norm."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from torchtitan.errors import ConfigError, divisors
from torchtitan.models.attention import CausalMask
from torchtitan.models.init import Constant, Normal, Rule
from torchtitan.models.layers import Attention, FeedForward, RopeScaling, RotaryEmbedding
from torchtitan.models.spec import MODELS, Divisible, Layout, ModelSpec, Role, Tokenwise


@dataclass(frozen=True)
class ParallelArgs:
    """Hyper-parameters: each is a key of ``[model.args]``."""

    dim: int = 1024
    n_layers: int = 16
    n_heads: int = 16
    vocab_size: int = 32000
    ffn_dim: int = 4096
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads):
            raise ConfigError(
                "model.args.n_heads", f"needs an even share of dim={self.dim}; try {divisors(self.dim // 2)}"
            )


class Both(nn.Module):
    """Attention and feed-forward of the same input, which a tensor-parallel rank gathers once for both."""

    def __init__(self, args: ParallelArgs) -> None:
        super().__init__()
        self.attention = Attention(args.dim, args.n_heads, args.n_heads, args.dim // args.n_heads, pairs="halves")
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None) -> Tensor:
        return self.attention(x, cos, sin, allowed) + self.feed_forward(x)


class Block(nn.Module):
    def __init__(self, args: ParallelArgs) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(args.dim, eps=1e-6)
        self.both = Both(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None) -> Tensor:
        return x + self.both(self.norm(x), cos, sin, allowed)


class Parallel(nn.Module):
    def __init__(self, args: ParallelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.rope = RotaryEmbedding(args.dim // args.n_heads, args.rope_theta, RopeScaling(1.0), "halves")
        self.mask = CausalMask()
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=1e-6)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rope(positions)
        allowed = self.mask(positions)
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, cos, sin, allowed)
        return self.output(self.norm(x))


def init_rules(args: ParallelArgs) -> Mapping[str, Rule]:
    """The first pattern that matches a parameter's name gives its initial weights."""
    return {
        "*norm.weight": Constant(1.0),
        "layers.*.wo.weight": Normal(0.02 / (2 * args.n_layers) ** 0.5),
        "layers.*.w2.weight": Normal(0.02 / (2 * args.n_layers) ** 0.5),
        "*": Normal(0.02),
    }


def flops(args: ParallelArgs, seq_len: int) -> Tokenwise:
    block = 4 * args.dim**2 + 3 * args.dim * args.ffn_dim + args.dim
    weights = args.n_layers * block + args.dim + args.dim * args.vocab_size
    return Tokenwise(weights=6.0 * weights, attention=6.0 * args.n_layers * 2 * args.dim * seq_len)


ROLES: Mapping[str, Role] = {
    "tok_embeddings": "embedding",
    "layers.*.norm": "norm",
    "layers.*.both": "gather",
    "layers.*.both.attention.w[qkv]": "column",
    "layers.*.both.attention.wo": "row",
    "layers.*.both.feed_forward.w[13]": "column",
    "layers.*.both.feed_forward.w2": "row",
    "norm": "norm",
    "output": "head",
}

FLAVORS = {
    "tiny": ParallelArgs(dim=64, n_layers=4, n_heads=4, vocab_size=16, ffn_dim=128),
    "300M": ParallelArgs(),
}

MODELS.register(
    "acme_parallel",
    ModelSpec(
        cls=Parallel,
        args_cls=ParallelArgs,
        flavors=FLAVORS,
        layout=Layout(
            stem=("tok_embeddings",),
            blocks="layers",
            head=("norm", "output"),
            attention="both.attention.inner_attention",
        ),
        init=init_rules,
        flops=flops,
        roles=ROLES,
        divisible=lambda args: Divisible(heads=args.n_heads, kv_heads=args.n_heads, hidden=args.ffn_dim),
    ),
)
