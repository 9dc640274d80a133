"""Converters at work: a model after them must still be one that can be spread, initialised and saved by its names.

Converters themselves are in ``transforms/``; when they are applied is said in ``parallelize.py``.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.models.spec import Layout
from torchtitan.transforms import Converter
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
