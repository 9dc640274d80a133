"""Saves a run's parts at the steps that ask for it, and finds where to go on.

Folders, completeness and retention are ``storage.py``'s. Weights and optimizer states go through PyTorch's distributed
checkpoints, so that any number of ranks reads what any other wrote; numbers go into the manifest as JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan.checkpoint.storage import (
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    StepFolders,
    damage,
    share,
    sync_file,
    write_durably,
)
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError
from torchtitan.log import logger

_METADATA = ".metadata"


class Numbers(Protocol):
    """A part whose state is JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpointer:
    """The parts of a run and the folder that holds their steps.

    ``modules`` are the model's parts on this rank and ``optimizer`` updates their parameters; ``numbers`` are the
    other parts by name. All methods are called by all ranks together.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        numbers: Mapping[str, Numbers],
        config_toml: str,
        interval: int,
        keep_latest: int,
        first_step: bool,
        load_only: bool,
        exclude: Sequence[str],
    ) -> None:
        self._folders = StepFolders(root)
        self._world = world
        self._parameters = {name: p for module in modules for name, p in module.named_parameters()}
        self._optimizer = optimizer
        self._numbers = numbers
        self._config_toml = config_toml
        self._interval = interval
        self._keep_latest = keep_latest
        self._first_step = first_step
        self._load_only = load_only
        self._exclude = set(exclude)
        self._saved: int | None = None

    # Saving

    def save(self, step: int, *, last: bool = False) -> None:
        """Save after ``step`` if one is due. A step that cannot be written is told and tried again at the next one due;
        the ``last`` one raises CheckpointError."""
        due = last or step % self._interval == 0 or (self._first_step and step == 1)
        if self._load_only or not due or step in (0, self._saved):
            return
        cause = self._together(lambda: self._folders.prepare(step), only_rank_0=True)
        cause = cause or self._write_tensors(step)
        cause = cause or self._write_manifest(step)
        if cause is None:
            self._saved = step
            logger.info(f"saved step {step} in {self._folders.path(step)}")
            return
        if self._world.rank == 0:
            self._folders.discard(step)
        message = f"step {step} could not be saved in {self._folders.root}: {cause}"
        if last:
            raise CheckpointError(message)
        logger.warning(f"{message}; training goes on and the next save is tried as usual")

    def _write_tensors(self, step: int) -> str | None:
        state: dict[str, Any] = {**self._parameters, "optimizer": optimizer_state(self._parameters, self._optimizer)}
        writer = dcp.FileSystemWriter(self._folders.partial(step), sync_files=False)
        try:
            dcp.save(state, storage_writer=writer)
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
            if all(isinstance(failure, OSError) for failure in failures):
                return str(failures[0])
            raise
        return None

    def _write_manifest(self, step: int) -> str | None:
        folder = self._folders.partial(step)
        files: dict[str, FileRecord] = {}

        def record() -> None:
            mine = [path for path in folder.glob(f"__{self._world.rank}_*")]
            if self._world.rank == 0:
                write_durably(folder / "config.toml", self._config_toml)
                mine += [folder / _METADATA, folder / "config.toml"]
            for path in mine:
                sync_file(path)
                files[path.name] = FileRecord.of(path)

        def commit() -> None:
            everyones = {name: entry for rank_files in gathered for name, entry in rank_files.items()}
            state = {name: part.state_dict() for name, part in self._numbers.items()}
            Manifest(step, state, everyones).write(folder)
            self._folders.commit(step)
            self._folders.retain(self._keep_latest)

        if cause := self._together(record):
            return cause
        gathered = self._world.gather(files)
        return self._together(commit, only_rank_0=True)

    def _together(self, action: Callable[[], Any], *, only_rank_0: bool = False) -> str | None:
        """Run ``action`` on the ranks and agree on what went wrong: the first I/O error of any, or None."""
        cause = None
        if not only_rank_0 or self._world.rank == 0:
            try:
                action()
            except OSError as error:
                cause = str(error)
        return next((c for c in self._world.gather(cause) if c is not None), None)

    # Loading

    def load(self, load_step: int, initial_path: str | None, *, initial_model_only: bool) -> None:
        """Go on from this run's newest good step (or ``load_step``), else from ``initial_path``, else from nothing.

        Damaged steps are named and passed over unless asked for by number, which is a CheckpointError.
        """
        if self._world.rank == 0 and not self._load_only:
            self._folders.recover()
        self._world.barrier()
        steps = self._folders.steps()
        for step in self._folders.incomplete():
            logger.warning(f"{self._folders.path(step)} is not complete (no {MANIFEST}); it is passed over")
        if load_step >= 0:
            if load_step not in steps:
                known = ", ".join(map(str, steps)) or "none"
                raise ConfigError(
                    "checkpoint.load_step",
                    f"no complete step of that number in {self._folders.root}; there are: {known}",
                )
            steps = [load_step]
        for step in reversed(steps):
            folder = self._folders.path(step)
            problem = self._damage(folder)
            if problem is None:
                self._resume(step, folder)
                return
            if load_step >= 0:
                raise CheckpointError(problem)
            logger.warning(f"{problem}; trying the step before it")
        if steps:
            raise CheckpointError(f"every step in {self._folders.root} is damaged; move the folder away to start anew")
        if initial_path is not None:
            self._start_from(
                find_step(Path(initial_path), "checkpoint.initial_load_path"), model_only=initial_model_only
            )

    def _resume(self, step: int, folder: Path) -> None:
        self._restore(folder)
        self._saved = step
        if self._world.rank == 0 and not self._load_only and (later := self._folders.set_aside_after(step)):
            logger.warning(f"going back to step {step}: later steps {later} are renamed to step-N.superseded")
        self._world.barrier()
        logger.info(f"going on after step {step} from {folder}")

    def _start_from(self, folder: Path, *, model_only: bool) -> None:
        ours = (folder / MANIFEST).exists()
        if ours and (problem := self._damage(folder)):
            raise CheckpointError(problem)
        if ours and not model_only:
            self._restore(folder)
        else:
            self._load_tensors(folder, optimizer=not model_only)
        logger.info(f"starting from {'the weights' if model_only else 'everything'} in {folder}")

    def _restore(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        self._load_tensors(folder, model="model" not in self._exclude, optimizer="optimizer" not in self._exclude)
        for name, part in self._numbers.items():
            if name not in self._exclude:
                part.load_state_dict(manifest.state[name])
        if self._exclude:
            logger.info(f"not loaded (checkpoint.exclude_from_loading): {', '.join(sorted(self._exclude))}")

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a step, agreed on by all ranks; each reads its share of the files."""

        def look() -> str | None:
            try:
                manifest = Manifest.read(folder)
            except CheckpointError as error:
                return str(error)
            return damage(folder, manifest, share(list(manifest.files), self._world.rank, self._world.size))

        return next((p for p in self._world.gather(look()) if p is not None), None)

    def _load_tensors(self, folder: Path, *, model: bool = True, optimizer: bool = True) -> None:
        reader = dcp.FileSystemReader(folder)
        metadata = reader.read_metadata()
        state: dict[str, Any] = {}
        if model:
            state.update(self._parameters)
        states: dict[str, Tensor] = {}
        if optimizer:
            states = empty_optimizer_state(self._parameters, metadata)
            state["optimizer"] = states
        check_shapes(state, metadata, folder)
        if state:
            dcp.load(state, storage_reader=reader)
        if optimizer:
            put_optimizer_state(self._parameters, self._optimizer, states)


def find_step(path: Path, key: str) -> Path:
    """The step that ``path`` means: itself, or the newest complete one below it."""
    if (path / _METADATA).is_file():
        return path
    for root in (path, path / "checkpoint"):
        if steps := StepFolders(root).steps():
            return StepFolders(root).path(steps[-1])
    raise ConfigError(key, f"no checkpoint at {path}: neither a step nor a folder with a complete one")


# Optimizer state: flat keys state.<parameter>.<name>, as TorchTitan writes them.


def optimizer_state(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for each parameter."""
    return {
        f"state.{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def empty_optimizer_state(parameters: Mapping[str, Tensor], metadata: Metadata) -> dict[str, Tensor]:
    """Room for the optimizer tensors that a checkpoint holds for ``parameters``, spread like them."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        prefix = f"optimizer.state.{name}."
        for full_key, entry in metadata.state_dict_metadata.items():
            if full_key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                key = full_key.removeprefix("optimizer.")
                if entry.size == parameter.shape:
                    state[key] = torch.zeros_like(parameter, dtype=dtype)
                else:
                    state[key] = torch.zeros(entry.size, dtype=dtype)
    return state


def put_optimizer_state(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Give the optimizer its tensors back. Rates and decays are the configuration's, never the file's."""
    for name, parameter in parameters.items():
        prefix = f"state.{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if own:
            optimizer.state[parameter] = own


def check_shapes(state: Mapping[str, Any], metadata: Metadata, folder: Path) -> None:
    """CheckpointError if a wanted tensor is missing or has another shape."""
    stored = metadata.state_dict_metadata
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        entry = stored.get(name)
        if entry is None:
            raise CheckpointError(f"{folder} holds no {name}; are model.name, flavor and args those it was saved with?")
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise CheckpointError(
                f"{folder} holds {name} as {list(entry.size)}, the model wants {list(tensor.shape)}; "
                "are model.flavor and model.args those it was saved with?"
            )
