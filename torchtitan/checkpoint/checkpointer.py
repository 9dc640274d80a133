"""Saves a run's parts at the steps that ask for it, beside training if that is wanted.

What is loaded at the start is in ``loader.py``; folders, completeness and retention in ``storage.py``; how bytes get
into files in ``background.py``. Ranks talk to each other on the training thread only, a number a step while a save is
in flight: what takes time runs elsewhere, and no rank waits in a collective for a storage.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from upath import UPath

from torchtitan.checkpoint.background import BESIDE_TRAINING, DirectWriter, Failure, Task, Writer, attempt
from torchtitan.checkpoint.content import Content, Planner
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.dcp.writer import Written
from torchtitan.checkpoint.manifest import Manifest, Numbers
from torchtitan.checkpoint.places import FileRecord, free_bytes, shown_bytes, write_durably
from torchtitan.checkpoint.storage import StepFolders, is_complete
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.config.schema import Checkpoint
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError
from torchtitan.log import logger

_POLL_SECONDS = 0.05
_SPARE_BYTES = 16 << 20  # for what is written beside the tensors


@dataclass
class _Save:
    """A folder that is being written: by ``task`` this rank's share, then on rank 0 what makes it ``complete``; after a
    ``failure`` its removal."""

    step: int
    name: str
    folder: UPath
    task: Task[Any]
    complete: Callable[[Sequence[Any]], None]
    last: bool
    began: float
    written: bool = False
    failure: Failure | None = None


class Checkpointer:
    """Saves ``tensors`` and ``numbers`` of a run into ``folders`` as the keys of ``[checkpoint]`` say.

    ``huggingface`` makes the weights of a step a Hugging Face model of a type. ``saved`` is the step that was loaded,
    which need not be saved again, ``start`` what a restart of the same command must not do a second time. All methods
    are called by all ranks together, on the training thread.
    """

    def __init__(
        self,
        folders: StepFolders,
        world: World,
        *,
        tensors: Tensors,
        numbers: Mapping[str, Numbers],
        huggingface: Callable[[Reader, torch.dtype], Content],
        config_toml: str,
        keys: Checkpoint,
        saved: int | None,
        start: Mapping[str, Any],
    ) -> None:
        self._folders = folders
        self._world = world
        self._tensors = tensors
        self._numbers = numbers
        self._huggingface = huggingface
        self._config_toml = config_toml
        self._keys = keys
        self._saved = saved
        self._start = start
        self._beside_training = keys.async_mode in BESIDE_TRAINING and not keys.load_only
        self._writer: Writer = BESIDE_TRAINING[keys.async_mode]() if self._beside_training else DirectWriter()
        self._reserved = False
        self._planner = Planner(world)
        self._save: _Save | None = None

    def is_due(self, step: int) -> bool:
        """Whether a save is due after ``step``, which is not the last."""
        keys = self._keys
        return step % keys.interval == 0 or (keys.enable_first_step_checkpoint and step == 1)

    def save(self, step: int, *, last: bool = False) -> None:
        """Save after ``step`` if one is due; the ``last`` one is waited for.

        One that is due while another is in flight is skipped with a warning. A storage that fails costs that save, told
        and tried again at the next one due; if it was the last one, and for any other error, CheckpointError.
        """
        self._advance()
        due = last or self.is_due(step)
        if last:
            self.finish()
        if self._beside_training and not (due or self._reserved):
            self._reserved = True
            self._planner.plan(self._tensors.state(), self._writer).reserve()
        if self._keys.load_only or not due or step in (0, self._saved):
            return
        if self._save is not None:
            seconds = time.monotonic() - self._save.began
            logger.warning(
                f"step {step} is not saved: {self._save.name} is still being written after {seconds:.0f} s; "
                "the next save is tried as usual"
            )
            return
        state = {name: part.state_dict() for name, part in self._numbers.items()} | {"start": self._start}
        # Of the last one no copy is needed: nothing changes any more.
        content = self._planner.plan(self._tensors.state(), DirectWriter() if last else self._writer)
        self._begin(step, self._folders.path(step), content, state, last=last)
        if last or not self._beside_training:
            self.finish()

    def export(self, step: int) -> None:
        """Leave the weights of the saved ``step`` alone beside it if the keys say so and they are not there yet;
        CheckpointError if that fails."""
        keys, folder = self._keys, self._folders.export(step)
        wanted = (keys.last_save_model_only or keys.last_save_in_hf) and not keys.load_only
        if not wanted or self._world.gather(is_complete(folder))[0]:
            return
        dtype = getattr(torch, keys.export_dtype)
        content: Content
        if keys.last_save_in_hf:
            content = self._huggingface(Reader(self._folders.path(step)), dtype)
        else:
            content = self._planner.plan(self._tensors.weights, DirectWriter(), dtype=dtype)
        self._begin(step, folder, content, {"model": self._numbers["model"].state_dict()}, last=True)
        self.finish()

    def finish(self) -> None:
        """Wait for the save in flight; CheckpointError if ``checkpoint.save_timeout_seconds`` pass."""
        pause, tell_after = _POLL_SECONDS, 30.0
        self._advance()
        while (save := self._save) is not None:
            save.task.wait(pause)
            self._advance()
            (waited,) = self._world.max([time.monotonic() - save.began])
            if self._save is save and waited > self._keys.save_timeout_seconds:
                raise CheckpointError(
                    f"{save.name} is still being written to {self._folders.root} after "
                    f"checkpoint.save_timeout_seconds={self._keys.save_timeout_seconds}; complete steps are untouched"
                )
            if waited > tell_after:
                logger.info(f"{save.name} is still being written to {self._folders.root} after {waited:.0f} s")
                pause, tell_after = 10 * _POLL_SECONDS, 2 * tell_after

    def close(self) -> None:
        """Release what writes; nothing is in flight any more."""
        self._writer.close()

    # Begin on all ranks, write on each, complete on rank 0

    def _begin(self, step: int, folder: UPath, content: Content, state: Mapping[str, Any], *, last: bool) -> None:
        began, folders, name = time.monotonic(), self._folders, folder.name.replace("-", " ")
        unnamed = folders.partial(folder)
        (total,) = self._world.sum([float(content.bytes)])

        def make_room() -> None:
            folders.sweep()  # what is left of a killed save must not take the room of this one
            free = free_bytes(folders.root)
            if free is not None and free < total + _SPARE_BYTES:
                raise OSError(f"it needs {shown_bytes(total)} and there are {shown_bytes(free)} left on the disk")
            folders.prepare(folder)

        def complete(shares: Sequence[Written]) -> None:
            files = {name: file for share in shares for name, file in share.files.items()}
            files |= content.complete(unnamed, shares)
            write_durably(unnamed / "config.toml", self._config_toml)
            files["config.toml"] = FileRecord.of(unnamed / "config.toml")
            Manifest(step, state, files).write(unnamed)
            folders.commit(folder)
            # What is saved stays so, whatever becomes of older ones.
            removal = attempt(lambda: folders.retain(self._keys.keep_latest_k, self._keys.keep_every_n_steps))
            if isinstance(removal, Failure):
                logger.warning(f"older steps in {folders.root} could not be removed: {removal.message}")

        if failure := self._first_failure(attempt(make_room) if self._world.rank == 0 else None):
            self._tell(name, failure, last)
            return
        task = Task(content.begin(unnamed), low_priority=self._beside_training and not last)
        self._save = _Save(step, name, folder, task, complete, last, began)

    def _advance(self) -> None:
        """Let the save in flight take its next turn, once all ranks are through with the last one."""
        while (save := self._save) is not None:
            (done,) = self._world.sum([float(save.task.done())])
            if done < self._world.size:
                return
            outcome = save.task.outcome()
            failure = self._first_failure(outcome)
            if save.failure is not None:  # and what was written of it is removed
                self._save = None
                self._tell(save.name, save.failure, save.last)
            elif failure is not None and not failure.storage:
                self._tell(save.name, failure, save.last)
            elif failure is not None:
                save.failure = failure
                save.task = self._on_rank_0(partial(self._folders.discard, save.folder))
            elif not save.written:
                shares = self._world.gather_to_first(outcome)
                save.written = True
                save.task = self._on_rank_0(partial(save.complete, shares or ()))
            else:
                self._save = None
                self._saved = save.step
                logger.info(f"saved {save.name} in {save.folder} ({time.monotonic() - save.began:.1f} s)")

    def _on_rank_0(self, action: Callable[[], None]) -> Task[Any]:
        return Task(action if self._world.rank == 0 else lambda: None)

    def _first_failure(self, outcome: Any) -> Failure | None:
        return self._world.first(outcome if isinstance(outcome, Failure) else None)

    def _tell(self, name: str, failure: Failure, last: bool) -> None:
        message = f"{name} could not be saved in {self._folders.root}: {failure.message}"
        if last or not failure.storage:
            raise CheckpointError(message)
        logger.warning(f"{message}; training goes on and the next save is tried as usual")
