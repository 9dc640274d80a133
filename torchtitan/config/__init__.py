"""The configuration: what may be said (schema), where it is said (sources), what it comes to (load), how it is shown.

Torch is not imported by anything in this room, so that help and errors take well under a second.
"""

from torchtitan.config.help import help_text
from torchtitan.config.load import describe_error, load_config
from torchtitan.config.render import to_toml
from torchtitan.config.schema import JobConfig
from torchtitan.errors import ConfigError

__all__ = ["ConfigError", "JobConfig", "describe_error", "help_text", "load_config", "to_toml"]
