"""Tiny models of every family, and folders as the Hugging Face library writes them, for tests of what reads them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchtitan.models.huggingface import to_config, to_huggingface
from torchtitan.models.spec import MODELS, ModelSpec

FAMILIES = ("gpt2", "llama3", "qwen2", "qwen3")
SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "ffn_dim": 48,
    "max_seq_len": 64,
}


def tiny(family: str, *, tied: bool = False, **more: Any) -> tuple[ModelSpec, Any]:
    spec = MODELS.get(family)
    known = {field.name for field in dataclasses.fields(spec.args_cls)}
    sizes = SIZES | {"tie_word_embeddings": tied} | more
    return spec, spec.args_cls(**{key: value for key, value in sizes.items() if key in known})


def random_weights(spec: ModelSpec, args: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every parameter of a model, a tied one once."""
    generator = torch.Generator().manual_seed(7)
    shapes = {name: p.shape for name, p in spec.build_meta(args).named_parameters()}
    return {name: (torch.randn(shape, generator=generator) / 4).to(dtype) for name, shape in shapes.items()}


def write_folder(
    folder: Path,
    spec: ModelSpec,
    args: Any,
    state: Mapping[str, Tensor],
    *,
    shards: int = 1,
    more: Mapping[str, Tensor] | None = None,
    without: str = "",
) -> dict[str, Tensor]:
    """A folder with their tensors of ``state`` in so many files, with ``more`` and without one; returns the tensors."""
    folder.mkdir()
    tensors = to_huggingface(spec, args, state) | dict(more or {})
    tensors.pop(without, None)
    (folder / "config.json").write_text(json.dumps(to_config(spec, args)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the library that is made for it."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in tensors, f"{name} is there twice"
            tensors[name] = tensor
    return tensors


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both hold the same tensors, bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
