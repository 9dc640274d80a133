"""What a section of the configuration is made of.

Which sections and keys there are is in schema.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from torchtitan.config.paths import written_out


def _path_text(text: str) -> str:
    """Home folders written out; ValueError for a name that no file system takes."""
    if "\0" in text or any(len(part.encode(errors="surrogateescape")) > 255 for part in text.split("/")):
        raise ValueError("is no path: a name in it is longer than 255 bytes, or has a zero byte")
    return written_out(text)


PathText = Annotated[str, AfterValidator(_path_text)]
"""A file or folder; ``~`` is the user's home."""
FolderText = Annotated[PathText, Field(min_length=1)]


def key(default: Any, meaning: str, **bounds: Any) -> Any:
    """Declare a key."""
    return Field(default, description=meaning, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section that names a registered part; the options of that part stand beside the keys declared here."""

    model_config = ConfigDict(extra="allow")
