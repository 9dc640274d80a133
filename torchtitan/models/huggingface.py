"""Weights and hyper-parameters of any family to and from those of its Hugging Face twin.

What holds what is told by the family, in the terms of ``twin.py``; files are read and written elsewhere.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from torchtitan.errors import ConfigError
from torchtitan.log import note_once
from torchtitan.models.layers import RopeScaling
from torchtitan.models.spec import MODELS, ModelSpec
from torchtitan.models.twin import REQUIRED, Key, Stored, Twin

_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
# Keys of a config.json that change no number of a decoder's training; of any other one, that it is not known is said.
_NEUTRAL = (
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "max_position_embeddings", "_*"),
    *("*_token_id", "*_token_ids", "use_cache", "auto_map", "max_window_layers", "sliding_window", "pretraining_tp"),
    *("n_ctx", "summary_*", "task_specific_params", "id2label", "label2id", "output_*", "return_dict*"),
    *("chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "problem_type", "gradient_checkpointing"),
)
_FORBIDDEN = {"quantization_config": None, "partial_rotary_factor": 1.0, "tie_encoder_decoder": False}


def family_of(config: Mapping[str, Any]) -> str:
    """The name of the family whose twin wrote ``config``; ConfigError if there is none."""
    twins = {twin.model_type: name for name in MODELS.names() if (twin := MODELS.get(name).huggingface) is not None}
    if config.get("model_type") not in twins:
        raise _refused("model_type", config.get("model_type"), f"is no family here; those that are: {_words(twins)}")
    return twins[config["model_type"]]


def from_config(spec: ModelSpec, config: Mapping[str, Any]) -> Any:
    """The hyper-parameters that ``config`` tells, as transformers 4 or 5 writes it.

    ConfigError, by name and value, for what this family does not compute. Dropout is not applied, which is said once.
    """
    twin = _twin(spec)
    if config.get("model_type", twin.model_type) != twin.model_type:
        raise _refused("model_type", config["model_type"], f"is not {twin.model_type!r}")
    for name, only in (_FORBIDDEN | dict(twin.fixed)).items():
        if config.get(name, only) != only:
            raise _refused(name, config[name], f"is not what this family computes, which is {only!r}")
    if wrong := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise _refused("layer_types", sorted(wrong)[0], "is not what this family computes, which is 'full_attention'")
    if dropped := [name for name in twin.dropout if config.get(name)]:
        note_once(f"config.json: dropout is not applied here: {', '.join(f'{n}={config[n]}' for n in dropped)}")
    known = {*twin.keys, *twin.fixed, *twin.written, *twin.dropout, *_FORBIDDEN, "layer_types"}
    known |= {"rope_theta", "rope_scaling", "rope_parameters"} if twin.rotary else set()
    if unknown := [k for k in config if k not in known and not any(fnmatchcase(k, n) for n in _NEUTRAL)]:
        note_once(f"config.json: keys that are not known here and change nothing: {', '.join(unknown)}")
    values = {key.field: _read(key, name, config) for name, key in twin.keys.items()}
    return spec.args_cls(**values, **(_read_rotary(config) if twin.rotary else {}))


def to_config(spec: ModelSpec, args: Any) -> dict[str, Any]:
    """What a ``config.json`` says of ``args``, in the spelling that transformers 4 and 5 both read."""
    twin = _twin(spec)
    config: dict[str, Any] = {"architectures": [twin.architecture], "model_type": twin.model_type}
    for name, key in twin.keys.items():
        value = getattr(args, key.written_from or key.field)
        if key.words is not None:
            value = next(theirs for theirs, ours in key.words.items() if ours == value)
        config[name] = value
    if twin.rotary:
        # Version 4 passes over the one table of version 5 without a word; version 5 knows these two.
        scaling = args.rope_scaling_args
        off = scaling.scaling_factor == 1.0
        table = {theirs: getattr(scaling, ours) for theirs, ours in _SCALING.items()}
        config |= {"rope_theta": args.rope_theta, "rope_scaling": None if off else {"rope_type": "llama3", **table}}
    return config | dict(twin.fixed) | dict(twin.written) | dict.fromkeys(twin.dropout, 0.0)


def _read(key: Key, name: str, config: Mapping[str, Any]) -> Any:
    value = config.get(name, key.default)
    if value is REQUIRED:
        raise ConfigError(None, f"config.json: {name} is missing")
    if key.words is None:
        return value
    if value not in key.words:
        raise _refused(name, value, f"is none of those that this family computes: {_words(key.words)}")
    return key.words[value]


def _read_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    table = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(table.pop("rope_theta", config.get("rope_theta", 10000.0)))
    kinds = {table.pop(name) for name in ("type", "rope_type") if name in table} or {"default"}
    if unbuilt := kinds - {"default", "llama3"}:
        raise _refused("rope_type", sorted(unbuilt)[0], "is not among those built: 'default', 'llama3'")
    scaling = RopeScaling(scaling_factor=1.0)
    if "llama3" in kinds:
        if missing := [name for name in _SCALING if name not in table]:
            raise ConfigError(None, f"config.json: {missing[0]} of rope_type='llama3' is missing")
        scaling = RopeScaling(**{ours: table.pop(theirs) for theirs, ours in _SCALING.items()})
    for name, value in table.items():
        if value is not None and _FORBIDDEN.get(name, REQUIRED) != value:
            raise _refused(name, value, f"is not known to rope_type={sorted(kinds)[0]!r}")
    return {"rope_theta": theta, "rope_scaling_args": scaling}


class TensorTable:
    """Which tensors of theirs hold which of ours for a model of ``args``, one tensor at a time.

    ``stored`` maps every name of theirs to what it holds; ``optional`` are names that need not be there, since they
    repeat a tied weight.
    """

    def __init__(self, spec: ModelSpec, args: Any) -> None:
        self._twin = _twin(spec)
        model = spec.build_meta(args)
        tied = spec.tied(args)
        self._ours = dict(model.named_parameters(remove_duplicate=False))
        blocks = [name for name, _ in model.get_submodule(spec.layout.blocks).named_children()]
        every: dict[str, Stored] = {}
        for name, stored in self._twin.tensors(args).items():
            for block in blocks if "*" in name else [""]:
                parts = tuple(part.replace("*", block) for part in stored.parts)
                every[name.replace("*", block)] = Stored(parts, stored.form)
        self.optional = {name: s for name, s in every.items() if any(part in tied for part in s.parts)}
        self.stored = {name: s for name, s in every.items() if name not in self.optional}

    def store(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """Their tensor ``name`` from ours in ``state``; ConfigError if one is missing or has another shape."""
        stored = self.stored[name]
        for part in stored.parts:
            if part not in state:
                raise ConfigError(None, f"{part}, of which {name} is made, is missing")
            _check_shape(part, state[part], self._ours[part])
        parts = [state[part] for part in stored.parts]
        return stored.form.store(parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def load(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Ours that their tensor ``name`` holds, none where it holds nothing that is learned; ConfigError if the name
        is not known or the shape is another one."""
        stored = self.find(name)
        if stored is None:
            return {}
        wholes: list[Tensor] = [self._ours[part] for part in stored.parts]
        _check_shape(name, tensor, stored.form.store(torch.cat(wholes)))
        pieces = stored.form.load(tensor).split([whole.shape[0] for whole in wholes])
        return {part: piece.contiguous() for part, piece in zip(stored.parts, pieces, strict=True)}

    def find(self, name: str) -> Stored | None:
        """What their tensor ``name`` holds, with or without the prefix; None if it is nothing that is learned."""
        every = self.stored | self.optional
        for full in (name, self._twin.prefix + name):
            if full in every:
                return every[full]
        if any(fnmatchcase(name, pattern) for pattern in self._twin.ignored):
            return None
        raise ConfigError(None, f"{name} is not a tensor of such a {self._twin.architecture}")

    def check_complete(self, found: Mapping[str, Any]) -> None:
        """ConfigError if a parameter of ours is not among ``found``."""
        for name, stored in self.stored.items():
            if any(part not in found for part in stored.parts):
                raise ConfigError(None, f"{name} is missing, which holds {_words(stored.parts)}")


def to_huggingface(spec: ModelSpec, args: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of theirs from all of ours, by name; a tied weight once. ConfigError where ours do not fit."""
    table = TensorTable(spec, args)
    held = {part for stored in (table.stored | table.optional).values() for part in stored.parts}
    if unknown := [name for name in state if name not in held]:
        raise ConfigError(None, f"{unknown[0]} is not a parameter of such a model")
    return {name: table.store(name, state) for name in table.stored}


def from_huggingface(spec: ModelSpec, args: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of ours from all tensors of theirs, by name; a tied weight under its first name.

    ConfigError for a tensor that is unknown, missing or of another shape, and for a second copy of a tied weight that
    is not the same.
    """
    table, tied = TensorTable(spec, args), spec.tied(args)
    ours: dict[str, Tensor] = {}
    for name, tensor in state.items():
        ours |= table.load(name, tensor)
    table.check_complete(ours)
    for second, first in tied.items():
        if second in ours and not torch.equal(ours.pop(second), ours[first]):
            raise ConfigError(None, f"tie_word_embeddings is true, but what holds {second} is not what holds {first}")
    return ours


def _check_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ConfigError(None, f"{name} has shape {list(tensor.shape)}, but such a model has {list(like.shape)}")


def _twin(spec: ModelSpec) -> Twin:
    if spec.huggingface is None:
        raise ConfigError("model.name", "this family has no Hugging Face twin")
    return spec.huggingface


def _refused(name: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(None, f"config.json: {name}={value!r} {problem}")


def _words(names: Any) -> str:
    return ", ".join(str(name) for name in names)
