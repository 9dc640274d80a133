"""Rewrites of a module on one device, by name; how a model is spread over devices is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan.registry import Registry

if TYPE_CHECKING:  # torch costs seconds, and --help lists the options of converters
    from torch.nn import Module

Converter = Callable[["Module"], None]
"""Changes a model on the meta device in place, before it is spread over devices."""

CONVERTERS: Registry[Callable[..., Converter]] = Registry("converter", home=__name__, receives=())
