"""The checkpoints of a configuration: where they lie, whether a run can begin with what is there, whether it is done.

What is loaded, and what is made of it on another layout, is in ``resume.py``.
"""

import os
import sys
from pathlib import Path
from typing import Any

from upath import UPath

from torchtitan.checkpoint.huggingface.files import WeightFolder
from torchtitan.checkpoint.huggingface.load import check_args
from torchtitan.checkpoint.manifest import Manifest, damage
from torchtitan.checkpoint.places import check_remote, is_local, place
from torchtitan.checkpoint.storage import StepFolders, check_start, find_step, is_complete, step_folders
from torchtitan.config import JobConfig
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.models.spec import ModelSpec
from torchtitan.resilience.folder import check_folder
from torchtitan.state import ModelFacts


def checkpoint_folders(config: JobConfig) -> StepFolders:
    """Where the run's steps lie."""
    return step_folders(place(config.checkpoint.folder, base=config.job.dump_folder, key="checkpoint.folder"))


def check_checkpoints(config: JobConfig, spec: ModelSpec, args: Any) -> None:
    """ConfigError for what ``[checkpoint]`` asks for and this run, or what lies in its folders, cannot give."""
    keys, folders = config.checkpoint, checkpoint_folders(config)
    if is_local(folders.root):
        check_folder(Path(str(folders.root)), "checkpoint.folder")
    elif os.environ.get("RANK", "0") == "0":  # one look is enough
        check_remote(folders.root, "checkpoint.folder")
    check_start(folders, keys.load_step)
    if keys.async_mode == "async_with_pinned_mem" and sys.platform != "linux":
        raise ConfigError("checkpoint.async_mode", 'memory is shared with a process on Linux only; take "async"')
    if keys.last_save_in_hf and spec.huggingface is None:
        raise ConfigError("checkpoint.last_save_in_hf", f"model.name={config.model.name} has no twin there")
    if keys.initial_load_path is None or folders.steps():
        return
    if not keys.initial_load_in_hf:
        step = find_step(keys.initial_load_path)
        if is_complete(step) and "model" not in keys.exclude_from_loading:
            _check_model_of(step, args)
    elif spec.huggingface is None:
        raise ConfigError("checkpoint.initial_load_in_hf", f"model.name={config.model.name} has no twin there")
    else:
        try:
            check_args(WeightFolder(keys.initial_load_path), spec, args)
        except CheckpointError as error:
            raise ConfigError("checkpoint.initial_load_path", str(error)) from None


def _check_model_of(step: UPath, args: Any) -> None:
    """ConfigError if the weights of a step of ours are those of another model."""
    try:
        ModelFacts.of(args).load_state_dict(Manifest.read(step).state["model"])
    except (CheckpointError, KeyError):
        return  # said when it is loaded


def finished_step(config: JobConfig) -> int | None:
    """The step at which an earlier run in the same folder ended, if that leaves nothing to do."""
    keys = config.checkpoint
    if not keys.enable or keys.load_step != -1:
        return None
    folders = checkpoint_folders(config)
    for step in folders.steps()[-1:]:
        if step >= config.training.steps and not _damaged(folders.path(step), step):
            exports = keys.last_save_model_only or keys.last_save_in_hf
            return step if not exports or keys.load_only or is_complete(folders.export(step)) else None
    return None


def _damaged(folder: UPath, step: int) -> bool:
    """Whether it is another step, or a file is missing or has another size; what is in them is looked at when they are
    loaded."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return True
    return manifest.step != step or damage(folder, manifest, manifest.files, content=False) is not None
