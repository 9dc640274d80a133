"""Where a run stands, and how it goes on from what was saved: the configuration's keys bound to ``checkpoint/``.

What is in a checkpoint and when it is written is there; the step is the trainer's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.huggingface.export import TOKENIZER_FILES, ExportContent, export_plan
from torchtitan.checkpoint.huggingface.load import load_weights
from torchtitan.checkpoint.loader import Loader, Start
from torchtitan.checkpoint.manifest import Numbers
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.config import to_toml
from torchtitan.data.tokenizer import DescribedTokenizer
from torchtitan.distributed.world import World
from torchtitan.log import logger
from torchtitan.resolve.checkpoints import checkpoint_folders
from torchtitan.resolve.job import Job
from torchtitan.state import DataPosition, ModelFacts, OptimizerFacts, ScheduleStart, TrainState


@dataclass
class Progress:
    """How far a run is: in steps, in its data, on its schedule."""

    state: TrainState
    position: DataPosition
    schedule_start: ScheduleStart


def go_on(
    job: Job,
    world: World,
    progress: Progress,
    *,
    parameters: Sequence[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> Checkpointer | None:
    """Bring ``parameters``, ``optimizer`` and ``progress`` to where the run goes on, and settle its global batch;
    returns what saves from now on, None if nothing does."""
    if not job.config.checkpoint.enable:
        _settle_batch_size(job, progress.state)
        return None
    names = [name for name, _ in job.spec.build_meta(job.args).named_parameters()]
    folders, tensors = checkpoint_folders(job.config), Tensors(parameters, names, optimizer)
    optimizers = job.optimizer.optimizers(names)
    numbers: dict[str, Numbers] = {
        "model": ModelFacts.of(job.args),
        "optimizer": OptimizerFacts(job.config.optimizer.name, optimizers),
        "train_state": progress.state,
        "dataloader": progress.position,
        "lr_scheduler": progress.schedule_start,
    }

    def read_huggingface(folder: str, weights: Mapping[str, Tensor]) -> None:
        load_weights(folder, job.spec, job.args, weights)

    keys = job.config.checkpoint
    if keys.load_only:
        logger.info("nothing will be saved: checkpoint.load_only")
    start = Loader(
        folders,
        world,
        tensors=tensors,
        numbers=numbers,
        optimizers=optimizers,
        read_huggingface=read_huggingface,
        keys=keys,
    ).load()
    _settle_batch_size(job, progress.state)
    _take_over(job, start, progress)
    if "lr_scheduler" in start.anew:
        progress.schedule_start.after_step = progress.state.step

    def export(step: Reader, dtype: torch.dtype) -> ExportContent:
        plan = export_plan(job.spec, job.args, step, dtype=dtype)
        return ExportContent(plan, step, tokenizer=_tokenizer_folder(job), rank=world.rank, ranks=world.size)

    return Checkpointer(
        folders,
        world,
        tensors=tensors,
        numbers=numbers,
        huggingface=export,
        config_toml=to_toml(job.config),
        keys=keys,
        saved=start.step,
        start={"excluded": keys.exclude_from_loading, "went_back_to": start.went_back_to},
    )


def _settle_batch_size(job: Job, state: TrainState) -> None:
    """The global batch is the configuration's, else the checkpoint's, else one local batch for every reader."""
    training = job.config.training
    if training.global_batch_size != -1:
        state.global_batch_size = training.global_batch_size
    elif not state.global_batch_size:
        state.global_batch_size = training.local_batch_size * job.spread.degrees.readers


def _take_over(job: Job, start: Start, progress: Progress) -> None:
    """Stand where a run of TorchTitan's stood, if it was one: where its data go on follows from the step."""
    if start.titan is None or "train_state" in start.anew:
        return
    progress.state.step = start.titan.step
    rows = progress.state.step * progress.state.global_batch_size
    progress.state.tokens_seen = start.titan.tokens_seen or rows * job.config.training.seq_len
    if "dataloader" not in start.anew:
        progress.position.next_row = rows
        logger.info(
            f"the data go on at row {rows}: step {start.titan.step} × global batch {progress.state.global_batch_size}"
        )
        if job.config.data.shuffle:
            logger.warning("data.shuffle = true: that is not the order in which TorchTitan reads; these are other rows")


def _tokenizer_folder(job: Job) -> Path | None:
    if job.tokenizer is None:
        logger.info("no tokenizer's files are left beside the weights: the data are tokens, and no tokenizer is named")
        return None
    file = job.tokenizer.file if isinstance(job.tokenizer, DescribedTokenizer) else None
    if file is None:
        logger.info(f"no tokenizer's files are left beside the weights: {job.config.tokenizer.name} has none")
    elif file.name not in TOKENIZER_FILES:
        logger.info(f"no tokenizer's files are left beside the weights: nobody looks for the name {file.name}")
    else:
        return file.parent
    return None
