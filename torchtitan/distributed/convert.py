"""Converters at work: a model after them must still be one that can be spread, initialised and saved by its names.

Converters themselves are in ``transforms/``; when they are applied is said in ``parallelize.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchtitan.distributed.topology import KEYS
from torchtitan.errors import ConfigError
from torchtitan.models.spec import Layout, Role, roles_of
from torchtitan.transforms import Converter
from torchtitan.transforms.float8 import Float8
from torchtitan.transforms.quantized import Quantized

_KEY = "model.converters"


def convert_model(
    model: nn.Module, converters: Sequence[Converter], tied: Mapping[str, str], *, whole: bool = False
) -> None:
    """Apply ``converters`` to ``model`` on the meta device; parameters that are ``tied``, second name to first, are the
    same ones afterwards. ``whole``: it is no stage of a pipeline, so a converter may check it. ConfigError if
    parameters have other names, share what is not told, or buffers exist."""
    before = set(dict(model.named_parameters(remove_duplicate=False)))
    for convert in converters:
        check = getattr(convert, "check", None)
        if whole and check is not None:
            check(model)
        convert(model)
    names = set(dict(model.named_parameters(remove_duplicate=False)))
    if changed := sorted(before ^ names):
        raise ConfigError(
            _KEY,
            f"parameter {changed[0]} {'is gone' if changed[0] in before else 'is new'} after them; a converter leaves "
            "the names of parameters as they are",
        )
    for second, first in tied.items():
        owner, _, name = second.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(first))
    if len(names) - len(tied) != len(dict(model.named_parameters())):
        raise ConfigError(_KEY, "parameters are shared after them that are not tied in this model")
    for name, _ in model.named_buffers():
        raise ConfigError(
            _KEY if converters else "model.name",
            f"buffer {name} would be lost between the meta device and the real one; compute it in the forward pass",
        )


def check_head(model: nn.Module, layout: Layout, converters: Sequence[Converter]) -> None:
    """ConfigError if ``model`` does not end with a linear map, which can be taken chunk by chunk."""
    name = layout.head[-1]
    head = model.get_submodule(name)
    if type(head) is not nn.Linear or "forward" in vars(head):
        what = "has another forward than nn.Linear" if type(head) is nn.Linear else f"is {type(head).__name__}"
        raise ConfigError(
            "loss.chunks",
            f"the head, {name}, {what} after model.converters, and only nn.Linear is taken in chunks; set it to 1"
            + "".join(
                f', or {convert.name}.filter_fqns to ["{name}"]'
                for convert in converters
                if isinstance(convert, Quantized) and convert.takes(head)
            ),
        )


def check_quantized(
    model: nn.Module, converters: Sequence[Converter], roles: Mapping[str, Role], *, tensor: int, tokens: int
) -> None:
    """ConfigError if maps of ``model``, as ``converters`` have left it, cannot be shared by as many ``tensor`` ranks,
    or cannot take as many ``tokens`` at once."""
    for convert in converters:
        if not isinstance(convert, Quantized):
            continue
        if tokens % convert.tokens_multiple_of:
            raise ConfigError(
                "training.local_batch_size",
                f"a rank computes {tokens} tokens at once, and {convert.name} takes multiples of "
                f"{convert.tokens_multiple_of}; change it or training.seq_len",
            )
        if tensor == 1:
            continue
        if isinstance(convert, Float8) and convert.scales_by_shards:
            raise ConfigError(
                f"{convert.name}.enable_fsdp_float8_all_gather",
                "weights would have a scale for each tensor rank; set "
                f"{convert.name}.precompute_float8_dynamic_scale_for_fsdp = true, which finds one for all of them, or "
                "leave it at false",
            )
        for name, role in roles_of(model, roles):
            module: Any = model.get_submodule(name)
            if convert.takes(module):
                side, features = "outputs", module.out_features
                if role == "row":
                    side, features = "inputs", module.in_features
                if features % (convert.part_multiple_of * tensor):
                    raise ConfigError(
                        KEYS["tensor"],
                        f"a rank's part of the {features} {side} of {name} would be no multiple of "
                        f"{convert.part_multiple_of}, which {convert.name} takes; lower it, or name {name} in "
                        f"{convert.name}.filter_fqns",
                    )
