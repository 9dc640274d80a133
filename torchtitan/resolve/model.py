"""The model of a configuration: its hyper-parameters, its converters, and whether its family's tables fit it.

How it is spread is planned in ``distributed/spread.py``.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed.convert import check_head, convert_model
from torchtitan.errors import ConfigError
from torchtitan.models.init import find_rule
from torchtitan.models.spec import ModelSpec, roles_of
from torchtitan.registry import unknown_name
from torchtitan.transforms import CONVERTERS, Converter


def resolve_args(spec: ModelSpec, flavor: str, overrides: Mapping[str, Any]) -> Any:
    """The flavor's hyper-parameters with ``overrides`` in their place, checked by the family's own types and rules."""
    if flavor not in spec.flavors:
        raise unknown_name("flavor", flavor, spec.flavors, key="model.flavor")
    values = _overlay(dataclasses.asdict(spec.flavors[flavor]), overrides, "model.args")
    try:
        # Through JSON, where strict types allow a table for a nested dataclass.
        return TypeAdapter(spec.args_cls).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"model.args.{where}", first["msg"].replace("Input should", "must")) from None


def _overlay(values: dict[str, Any], overrides: Mapping[str, Any], key: str) -> dict[str, Any]:
    for name, value in overrides.items():
        if name not in values:
            raise unknown_name("key", name, values, key=f"{key}.{name}")
        if value in ("none", "null") and not isinstance(values[name], str):
            value = None  # on a command line there is no other way to say it
        if isinstance(value, int) and abs(value) >= 2**40:
            raise ConfigError(f"{key}.{name}", "is larger than any model")
        if isinstance(value, Mapping) and isinstance(values[name], dict):
            values[name] = _overlay(values[name], value, f"{key}.{name}")
        else:
            values[name] = value
    return values


def check_model(spec: ModelSpec, args: Any, converters: Sequence[Converter], *, loss_chunks: int) -> nn.Module:
    """The whole model on the meta device, after ``converters``; ConfigError if what a family tells of its model does
    not fit it, or converters leave none that fits or of whose head the loss cannot be taken in chunks."""
    model, rules, tied = spec.build_meta(args), spec.init(args), spec.tied(args)
    convert_model(model, converters, tied, whole=True)
    try:
        spec.layout.check(model)
        for name, _ in model.named_parameters():
            find_rule(rules, tied.get(name, name))
        list(roles_of(model, spec.roles))
    except LookupError as error:
        raise ConfigError("model.name", f"the tables of this family do not fit its model: {error}") from None
    if loss_chunks > 1:
        check_head(model, spec.layout, converters)
    return model


def check_positions(spec: ModelSpec, args: Any, seq_len: int) -> None:
    """ConfigError if the model has no positions for rows of ``seq_len`` tokens."""
    longest = spec.max_seq_len(args)
    if longest is not None and seq_len > longest:
        raise ConfigError(
            "training.seq_len",
            f"the model has positions for {longest} tokens; lower it, or raise model.args.max_seq_len",
        )


def bind_converter(name: str, config: JobConfig) -> Converter:
    """The converter of that name with its own options."""
    built: Converter = CONVERTERS.bind(name, config.converter_args.get(name, {}), key="model.converters")()
    if not callable(built):
        raise ConfigError("model.converters", f"what builds {name!r} must return a function of a model, not {built!r}")
    return built
