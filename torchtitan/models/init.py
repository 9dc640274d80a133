"""Initial weights as a function of seed, parameter name and shape alone, so that every layout starts bit-equal.

No family's rules stand here, and nothing about who holds which part of a parameter.
"""

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Rows are drawn in blocks of about this many elements, each from a generator of its own: a process that holds a
# few rows draws little more than those, and a block fits the cache.
_BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Normal:
    """Mean 0 and standard deviation ``std``, cut at ``cut`` standard deviations on either side (None: no cut)."""

    std: float
    cut: float | None = None

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        if self.cut is None:
            out.normal_(0.0, self.std, generator=generator)
        else:
            bound = self.cut * self.std
            nn.init.trunc_normal_(out, 0.0, self.std, -bound, bound, generator=generator)


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        out.fill_(self.value)


Rule = Normal | Constant


def find_rule(rules: Mapping[str, Rule], name: str) -> Rule:
    """The rule of the first pattern that matches ``name``; LookupError if none does."""
    for pattern, rule in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return rule
    raise LookupError(f"no init rule matches parameter {name!r}; patterns: {', '.join(rules)}")


def draw(
    name: str, shape: Sequence[int], rule: Rule, seed: int, offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """The box at ``offsets`` with extents ``sizes`` of the float32 parameter ``name`` of the full ``shape``.

    Drawn on the CPU whatever the device is, so that a laptop and a cluster start from the same weights.
    """
    out = torch.empty(tuple(sizes), dtype=torch.float32)
    if out.numel() == 0:
        return out
    if not shape:
        rule.fill(out, _generator(seed, name, 0))
        return out
    box = (slice(None), *(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True)))
    row_elements = max(1, torch.Size(shape[1:]).numel())
    height = max(1, _BLOCK_ELEMENTS // row_elements)
    first, last = offsets[0], offsets[0] + sizes[0]
    for index in range(first // height, -(-last // height)):
        top = index * height
        block = torch.empty(min(height, shape[0] - top), *shape[1:], dtype=torch.float32)
        rule.fill(block, _generator(seed, name, index))
        start, stop = max(first, top), min(last, top + block.shape[0])
        out[start - first : stop - first] = block[start - top : stop - top][box]
    return out


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
