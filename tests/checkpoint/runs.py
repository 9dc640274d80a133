"""The least that can be saved and go on, what a storage may be made to do, and what is said of it.

Runs of the real trainer are in ``tests/runs.py``.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from upath import UPath

from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.loader import Loader
from torchtitan.checkpoint.places import RecordedFile
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.config.schema import Checkpoint
from torchtitan.distributed.world import World
from torchtitan.log import logger
from torchtitan.state import TrainState


class Run:
    """Two weights that are the number of the step, with momentum that all steps have a share in."""

    def __init__(
        self, folder: Path, world: World, *, shape: tuple[int, int] = (300, 200), resume: bool = False, **keys: Any
    ) -> None:
        self.weights = {name: torch.nn.Parameter(torch.zeros(shape)) for name in ("a", "b")}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.0, momentum=0.5)
        self.state = TrainState()
        self.folders = storage.step_folders(UPath(folder))
        tensors = Tensors(list(self.weights.items()), list(self.weights), self.optimizer)
        numbers, section = (
            {"model": TrainState(), "train_state": self.state},
            Checkpoint(enable=True, interval=1, **keys),
        )
        began: dict[str, Any] = {"saved": None, "start": {}}
        if resume:
            start = Loader(
                self.folders,
                world,
                tensors=tensors,
                numbers=numbers,
                optimizers={},
                read_huggingface=mock.Mock(),
                keys=section,
            ).load()
            began = {"saved": start.step, "start": {"went_back_to": start.went_back_to}}
        self.checkpointer = Checkpointer(
            self.folders,
            world,
            tensors=tensors,
            numbers=numbers,
            huggingface=mock.Mock(),
            config_toml="[checkpoint]\n",
            keys=section,
            **began,
        )

    def step(self, *, last: bool = False) -> None:
        """Every weight becomes the number of the step; then what is due is saved."""
        self.state.step += 1
        for weight in self.weights.values():
            weight.data.fill_(self.state.step)
            weight.grad = torch.full_like(weight, self.state.step)
        self.optimizer.step()
        self.checkpointer.save(self.state.step, last=last)

    def spoil(self) -> None:
        for weight in self.weights.values():
            weight.data.fill_(-1)

    def close(self) -> None:
        self.checkpointer.close()


def content_is_right(folders: storage.StepFolders, step: int) -> bool:
    """Whether a saved step of a ``Run`` is what the run was after it."""
    reader = Reader(folders.path(step))
    momentum = sum(n * 0.5 ** (step - n) for n in range(1, step + 1))
    return all(
        bool((reader.tensor(name) == step).all())
        and bool((reader.tensor(f"optimizer.state.{name}.momentum_buffer") == momentum).all())
        for name in ("a", "b")
    )


@contextmanager
def storage_that(does: Callable[[str], None]) -> Iterator[None]:
    """Before each file is opened for writing ``does`` is called with its name."""
    open_file = RecordedFile.open

    def slow(self: RecordedFile) -> Any:
        does(self.path.name)
        return open_file(self)

    with mock.patch.object(RecordedFile, "open", slow):
        yield


@contextmanager
def said(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The lines of the log from ``level`` on."""
    lines: list[str] = []
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
