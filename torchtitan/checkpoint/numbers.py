"""What a checkpoint keeps as JSON: the parts of a run that are no tensors."""

from collections.abc import Mapping
from typing import Any, Protocol


class Numbers(Protocol):
    """A part whose state is JSON. ``load_state_dict`` raises ConfigError where it does not fit the configuration."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
