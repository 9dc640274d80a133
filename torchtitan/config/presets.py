"""The configurations that come with the package, by name: ``llama3_8b`` wherever the package is installed.

Reading a file is in sources.py. The files themselves are those of ``train_configs/`` at the top of the repository,
which the package holds by a link, and a built one as a copy.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "train_configs"
DEFAULT = "debug_model"
"""What a launch that names no file trains."""


def preset_names() -> list[str]:
    """All of them, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def preset_file(name: str) -> Path | None:
    """The file of the preset that ``name`` means, ``llama3_8b`` or ``train_configs/llama3_8b.toml``; None if none."""
    path = Path(name)
    if path.parts[:-1] == ("train_configs",) and path.suffix == ".toml":
        name = path.stem
    return _FOLDER / f"{name}.toml" if name in preset_names() else None
