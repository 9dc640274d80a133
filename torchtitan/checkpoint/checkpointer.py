"""Saves a run's parts at the steps that ask for it, and finds where to go on.

Folders, completeness and retention are in ``storage.py``, weights and optimizer states in ``tensors.py``. Numbers go
into the manifest as JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import (
    MANIFEST,
    METADATA,
    CheckpointError,
    FileRecord,
    Manifest,
    NewerFormat,
    StepFolders,
    damage,
    find_step,
    share,
    sync_file,
    write_durably,
)
from torchtitan.checkpoint.tensors import copy_state, read_tensors, write_tensors
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError
from torchtitan.log import logger


class Numbers(Protocol):
    """A part whose state is JSON. ``load_state_dict`` raises ConfigError where it does not fit the configuration."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpointer:
    """The parts of a run and the folder that holds their steps.

    ``parameters`` are those of this rank, and ``names`` those of the whole model; a name that comes twice has two
    copies, which stay equal. ``optimizer`` updates them; ``numbers`` are the other parts by name, and whatever of
    "model" and "optimizer" is no tensor. All methods are called by all ranks together.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        parameters: Sequence[tuple[str, Tensor]],
        names: Sequence[str],
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
        self._parameters: dict[str, Tensor] = {}
        self._twins = [(first, p) for name, p in parameters if (first := self._parameters.setdefault(name, p)) is not p]
        self._names = names
        self._optimizer = optimizer
        self._numbers = numbers
        self._config_toml = config_toml
        self._interval = interval
        self._keep_latest = keep_latest
        self._first_step = first_step
        self._load_only = load_only
        self._exclude = list(exclude)
        self._saved: int | None = None
        self._went_back_to: int | None = None

    # Saving

    def save(self, step: int, *, last: bool = False) -> None:
        """Save after ``step`` if one is due. A step that cannot be written is told and tried again at the next one due;
        the ``last`` one raises CheckpointError."""
        due = last or step % self._interval == 0 or (self._first_step and step == 1)
        if self._load_only or not due or step in (0, self._saved):
            return
        folder = self._folders.partial(step)
        cause = self._together(lambda: self._folders.prepare(step), only_rank_0=True)
        cause = cause or self._together(lambda: write_tensors(folder, self._parameters, self._optimizer))
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

    def _write_manifest(self, step: int) -> str | None:
        folder = self._folders.partial(step)
        files: dict[str, FileRecord] = {}

        def record() -> None:
            mine = list(folder.glob(f"__{self._world.rank}_*"))
            if self._world.rank == 0:
                write_durably(folder / "config.toml", self._config_toml)
                mine += [folder / METADATA, folder / "config.toml"]
            for path in mine:
                sync_file(path)
                files[path.name] = FileRecord.of(path)

        def commit() -> None:
            everyones = {name: entry for rank_files in gathered for name, entry in rank_files.items()}
            state = {name: part.state_dict() for name, part in self._numbers.items()}
            # What a restart of the same command must not do a second time.
            state["start"] = {"excluded": self._exclude, "went_back_to": self._went_back_to}
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

    def load(self, load_step: int, initial_path: str | None, *, initial_model_only: bool) -> set[str]:
        """Go on from this run's newest good step (or ``load_step``), else from ``initial_path``, else from nothing.

        Returns the parts that were not loaded although there was a step. Damaged steps are named and passed over unless
        asked for by number, which is a CheckpointError.
        """
        if self._world.rank == 0 and not self._load_only:
            self._folders.recover()
        self._world.barrier()
        steps = self._steps_to_try(load_step)
        for step in reversed(steps):
            folder = self._folders.path(step)
            problem = self._damage(folder)
            if problem is None:
                return self._resume(step, folder)
            if load_step >= 0:
                raise CheckpointError(problem)
            logger.warning(f"{problem}; trying the step before it")
        if steps:
            raise CheckpointError(f"every step in {self._folders.root} is damaged; move the folder away to start anew")
        if initial_path is not None:
            return self._start_from(find_step(initial_path), model_only=initial_model_only)
        return set()

    def _steps_to_try(self, load_step: int) -> list[int]:
        steps = self._folders.steps()
        for step in self._folders.incomplete():
            logger.warning(f"{self._folders.path(step)} is not complete (no {MANIFEST}); it is passed over")
        if not steps and (foreign := self._folders.foreign()):
            raise ConfigError(
                "checkpoint.folder",
                f"{self._folders.path(foreign[-1])} was written by another program; to start from it, name it as "
                "checkpoint.initial_load_path and save elsewhere",
            )
        if load_step < 0:
            return steps
        if load_step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                "checkpoint.load_step", f"no complete step of that number in {self._folders.root}; there are: {known}"
            )
        if steps[-1] > load_step and _start_of(self._folders.path(steps[-1])).get("went_back_to") == load_step:
            logger.info(f"this run has gone back to step {load_step} already and goes on from there")
            return [steps[-1]]
        self._went_back_to = load_step
        return [load_step]

    def _resume(self, step: int, folder: Path) -> set[str]:
        anew = self._restore(folder)
        step_now = 0 if "train_state" in anew else step
        self._saved = step_now
        if self._world.rank == 0 and not self._load_only and (later := self._folders.set_aside_after(step_now)):
            logger.warning(f"going back to step {step_now}: later steps {later} are renamed to step-N.superseded")
        self._world.barrier()
        logger.info(f"going on after step {step_now} from {folder}")
        return anew

    def _start_from(self, folder: Path, *, model_only: bool) -> set[str]:
        ours = (folder / MANIFEST).exists()
        if ours and (problem := self._damage(folder)):
            raise CheckpointError(problem)
        logger.info(f"starting from {'the weights' if model_only else 'everything'} in {folder}")
        if ours and not model_only:
            return self._restore(folder)
        self._read(folder, set(self._exclude) | ({"optimizer"} if model_only else set()))
        return set()

    def _restore(self, folder: Path) -> set[str]:
        manifest = Manifest.read(folder)
        started_with = manifest.state.get("start", {})
        if self._went_back_to is None:
            self._went_back_to = started_with.get("went_back_to")
        # A part that the same command excluded before has started anew already.
        anew = set(self._exclude) - set(started_with.get("excluded", ()))
        for name, part in self._numbers.items():
            if name not in anew:
                try:
                    part.load_state_dict(manifest.state[name])
                except ConfigError:
                    if name not in self._exclude:
                        raise
                    anew.add(name)
                except (KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(f"{folder / MANIFEST} holds no usable {name}: {error!r}") from error
        self._read(folder, anew)
        if anew:
            logger.info(f"not loaded (checkpoint.exclude_from_loading): {', '.join(sorted(anew))}")
        return anew

    def _read(self, folder: Path, without: set[str]) -> None:
        read_tensors(
            folder,
            self._parameters,
            self._optimizer,
            names=self._names,
            with_model="model" not in without,
            with_optimizer="optimizer" not in without,
        )
        for first, twin in self._twins:
            copy_state(first, twin, self._optimizer)

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a step, agreed on by all ranks; each reads its share of the files."""

        def look() -> str | None:
            try:
                manifest = Manifest.read(folder)
            except NewerFormat:  # the step before it would be an older state of the run
                raise
            except CheckpointError as error:
                return str(error)
            return damage(folder, manifest, share(list(manifest.files), self._world.rank, self._world.size))

        return next((p for p in self._world.gather(look()) if p is not None), None)


def _start_of(folder: Path) -> Mapping[str, Any]:
    try:
        start: Mapping[str, Any] = Manifest.read(folder).state.get("start", {})
    except CheckpointError:
        return {}
    return start
