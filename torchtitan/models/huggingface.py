"""Weights and hyper-parameters of any family to and from those of its Hugging Face twin.

What holds what is told by the family, in the terms of ``twin.py``; files are read and written elsewhere.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from torchtitan.errors import ConfigError, brief
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
_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def family_of(config: Mapping[str, Any]) -> str:
    """The name of the family whose twin wrote ``config``; ConfigError if there is none."""
    _check_named("config.json", config)
    twins = {twin.model_type: name for name in MODELS.names() if (twin := MODELS.get(name).huggingface) is not None}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in twins:
        raise _refused("model_type", kind, f"is no family here; those that are: {_words(twins)}")
    return twins[kind]


def from_config(spec: ModelSpec, config: Mapping[str, Any]) -> Any:
    """The hyper-parameters that ``config`` tells, as transformers 4 or 5 writes it.

    ConfigError, by their name and value, for what this family does not compute, for a value of another type than its
    field and for keys that contradict each other. Dropout is not applied, which is said once.
    """
    twin = _twin(spec)
    _check_named("config.json", config)
    for name, only in {"model_type": twin.model_type, **_FORBIDDEN, **twin.fixed}.items():
        if not _same(config.get(name, only), only):
            raise _refused(name, config[name], f"is not what this family computes, which is {only!r}")
    layers = _typed("layer_types", config.get("layer_types"), list[str] | None)
    if wrong := set(layers or ()) - {"full_attention"}:
        raise _refused("layer_types", sorted(wrong)[0], "is not what this family computes, which is 'full_attention'")
    if dropped := {name: p for name in twin.dropout if (p := _typed(name, config.get(name), float | None))}:
        note_once(f"config.json: dropout is not applied here: {', '.join(f'{n}={p}' for n, p in dropped.items())}")
    known = {*twin.keys, *twin.fixed, *twin.written, *twin.dropout, *_FORBIDDEN, "layer_types"}
    known |= {"rope_theta", "rope_scaling", "rope_parameters"} if twin.rotary else set()
    if unknown := [k for k in config if k not in known and not any(fnmatchcase(k, n) for n in _NEUTRAL)]:
        note_once(f"config.json: keys that are not known here and change nothing: {_words(map(brief, unknown))}")
    fields = {name: key.field for name, key in twin.keys.items()}
    values = {name: _read(key, name, config) for name, key in twin.keys.items()}
    if not twin.rotary:
        return _build(spec.args_cls, "model.args", fields, values)
    theta, scaling = _read_rotary(config)
    fields["rope_theta"], values["rope_theta"] = "rope_theta", theta
    return _build(spec.args_cls, "model.args", fields, values, rope_scaling_args=scaling)


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
    if value is None and key.default is not None:
        raise _refused(name, value, "is no value for this key")
    if key.words is None:
        return value
    words = [ours for theirs, ours in key.words.items() if _same(value, theirs)]
    if not words:
        raise _refused(name, value, f"is none of those that this family computes: {_words(key.words)}")
    return words[0]


def _read_rotary(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Theta and scaling, which may be told in several places that agree."""
    names = ("rope_parameters", "rope_scaling")
    tables = [table for name in names if (table := _typed(name, config.get(name), dict[str, Any] | None))]
    scalings = [_read_scaling({k: v for k, v in table.items() if k != "rope_theta"}) for table in tables]
    thetas = [_typed("rope_theta", t["rope_theta"], float) for t in (config, *tables) if "rope_theta" in t]
    if thetas != thetas[:1] * len(thetas):
        raise _refused("rope_theta", thetas[0], f"contradicts the others, {thetas[1:]}; keep one")
    if scalings != scalings[:1] * len(scalings):
        raise _refused(names[0], tables[0], f"contradicts rope_scaling={brief(repr(tables[1]))}; keep one")
    return (*thetas, 10000.0)[0], (*scalings, RopeScaling(scaling_factor=1.0))[0]


def _read_scaling(table: dict[str, Any]) -> RopeScaling:
    kinds = sorted({_typed(name, table.pop(name), str) for name in ("type", "rope_type") if name in table})
    if unbuilt := [kind for kind in kinds if kind not in ("default", "llama3")]:
        raise _refused("rope_type", unbuilt[0], "is not among those built: 'default', 'llama3'")
    if len(kinds) > 1:
        raise _refused("rope_type", kinds[1], f"contradicts {kinds[0]!r}; keep one")
    scaling = RopeScaling(scaling_factor=1.0)
    if kinds == ["llama3"]:
        if missing := [name for name in _SCALING if name not in table]:
            raise ConfigError(None, f"config.json: {missing[0]} of rope_type='llama3' is missing")
        values = {name: table.pop(name) for name in _SCALING}
        scaling = _build(RopeScaling, "model.args.rope_scaling_args", _SCALING, values)
    for name, value in table.items():
        if value is not None and not _same(value, _FORBIDDEN.get(name, REQUIRED)):
            raise _refused(name, value, f"is not known to rope_type={(*kinds, 'default')[0]!r}")
    return scaling


def _build(cls: Any, prefix: str, fields: Mapping[str, str], values: Mapping[str, Any], **more: Any) -> Any:
    """``cls`` of their ``values`` in its ``fields``, and of ``more``; what it refuses is told by their name."""
    types = get_type_hints(cls, include_extras=True)
    typed = {field: _typed(name, values[name], types[field]) for name, field in fields.items()}
    try:
        return cls(**typed, **more)
    except ConfigError as error:
        for name, field in fields.items():
            if error.key == f"{prefix}.{field}":
                raise _refused(name, values[name], f"is refused: {error.problem}") from None
        raise


def _typed(name: str, value: Any, kind: Any) -> Any:
    """``value`` as strict JSON has it for the type ``kind``; ConfigError if it is of another type."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _refused(name, value, "is beyond 64 bits")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise _refused(name, value, error.errors(include_url=False)[0]["msg"].removeprefix("Input ")) from None
    except (TypeError, ValueError, RecursionError):
        raise _refused(name, value, "is not a value of JSON") from None


def _same(value: Any, other: Any) -> bool:
    """Whether they are equal and of one type; 1 is 1.0, and not True."""
    numbers = {type(value), type(other)} == {int, float}
    return (numbers or type(value) is type(other)) and bool(value == other)


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
            _check_tensor(part, state[part], self._ours[part])
        parts = [state[part] for part in stored.parts]
        return stored.form.store(parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def load(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Ours that their tensor ``name`` holds, none where it holds nothing that is learned; ConfigError if the name
        is not known, the shape is another one or the numbers are no weights."""
        stored = self.find(name)
        if stored is None:
            return {}
        wholes: list[Tensor] = [self._ours[part] for part in stored.parts]
        _check_tensor(name, tensor, stored.form.store(torch.cat(wholes)))
        pieces = stored.form.load(tensor).split([whole.shape[0] for whole in wholes])
        return {part: piece.contiguous() for part, piece in zip(stored.parts, pieces, strict=True)}

    def find(self, name: str) -> Stored | None:
        """What their tensor ``name`` holds, with or without the prefix; None if it is nothing that is learned."""
        if not isinstance(name, str):
            raise ConfigError(None, f"{brief(repr(name))} is not the name of a tensor")
        every = self.stored | self.optional
        for full in (name, self._twin.prefix + name):
            if full in every:
                return every[full]
        if any(fnmatchcase(name, pattern) for pattern in self._twin.ignored):
            return None
        raise ConfigError(None, f"{brief(name)} is not a tensor of such a {self._twin.architecture}")

    def check_complete(self, found: Mapping[str, Any]) -> None:
        """ConfigError if a parameter of ours is not among ``found``."""
        for name, stored in self.stored.items():
            if any(part not in found for part in stored.parts):
                raise ConfigError(None, f"{name} is missing, which holds {_words(stored.parts)}")


def to_huggingface(spec: ModelSpec, args: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of theirs from all of ours, by name; a tied weight once. ConfigError where ours do not fit."""
    _check_named("tensors", state)
    table = TensorTable(spec, args)
    held = {part for stored in (table.stored | table.optional).values() for part in stored.parts}
    if unknown := [name for name in state if name not in held]:
        raise ConfigError(None, f"{brief(unknown[0])} is not a parameter of such a model")
    return {name: table.store(name, state) for name in table.stored}


def from_huggingface(spec: ModelSpec, args: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of ours from all tensors of theirs, by name; a tied weight under its first name.

    ConfigError for a tensor that is unknown, missing, of another shape, no weight, or there under two names, and for a
    second copy of a tied weight that is not the same.
    """
    _check_named("tensors", state)
    table, tied = TensorTable(spec, args), spec.tied(args)
    ours: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    for name, tensor in state.items():
        for part, piece in table.load(name, tensor).items():
            if part in ours:
                raise ConfigError(None, f"{name} is there as {source[part]} as well; drop one of them")
            ours[part], source[part] = piece, name
    table.check_complete(ours)
    for second, first in tied.items():
        if second in ours and not torch.equal(ours.pop(second), ours[first]):
            raise ConfigError(None, f"tie_word_embeddings is true, but what holds {second} is not what holds {first}")
    return ours


def _check_tensor(name: str, tensor: Any, like: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigError(None, f"{name} is of type {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided or tensor.dtype not in _WEIGHTS:
        raise ConfigError(None, f"{name} is {tensor.dtype} and {tensor.layout}; weights are strided {_words(_WEIGHTS)}")
    if tensor.shape != like.shape:
        raise ConfigError(None, f"{name} has shape {list(tensor.shape)}, but such a model has {list(like.shape)}")


def _check_named(what: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(None, f"{what}: must be a table of names and values, not of type {type(table).__name__}")
    if wrong := [name for name in table if not isinstance(name, str)]:
        raise ConfigError(
            None, f"{what}: {brief(repr(wrong[0]))} must be a name, not of type {type(wrong[0]).__name__}"
        )


def _twin(spec: ModelSpec) -> Twin:
    if spec.huggingface is None:
        raise ConfigError("model.name", "this family has no Hugging Face twin")
    return spec.huggingface


def _refused(name: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(None, f"config.json: {brief(name)}={brief(repr(value))} {problem}")


def _words(names: Any) -> str:
    return ", ".join(str(name) for name in names)
