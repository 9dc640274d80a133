"""The trainer: wires the parts of a job, and the loop over steps.

What a part does is in its room; what is said in the configuration is bound in ``resolve/``.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan import __version__
from torchtitan.allocator import describe as describe_allocator
from torchtitan.data.batch import Batch
from torchtitan.data.loader import build_loader
from torchtitan.distributed.compile import Graphs
from torchtitan.distributed.fsdp import Precision
from torchtitan.distributed.gradients import clip_by_norm, global_norm
from torchtitan.distributed.parallelize import parallelize
from torchtitan.distributed.parts import SpreadParts
from torchtitan.distributed.spread import micro_batches
from torchtitan.distributed.stages import describe as describe_pipeline
from torchtitan.distributed.topology import build_topology
from torchtitan.distributed.whole import map_whole
from torchtitan.distributed.world import World, seed_step
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.evaluate import build_evaluator, open_held_out
from torchtitan.feed import blended, by_place, check_same, check_share, data_stages, open_rows
from torchtitan.log import logger
from torchtitan.observe.clock import Clock
from torchtitan.observe.device import describe, has_fast_bfloat16, memory, peak_flops
from torchtitan.observe.metrics import Metrics, StepStats
from torchtitan.observe.sinks import RunFiles, build_sinks
from torchtitan.resilience.finite import FiniteGuard, NonFiniteError
from torchtitan.resilience.guard import GarbageCollection, StopRequest
from torchtitan.resolve.job import Job
from torchtitan.resume import Progress, go_on
from torchtitan.state import DataPosition, ScheduleStart, TrainState


class Trainer:
    """One run: its parts, its state, its loop. Built and run by all ranks together."""

    def __init__(self, job: Job, world: World) -> None:
        config = job.config
        self.job, self.world = job, world
        self.steps = config.training.steps
        self.precision = Precision(
            storage=getattr(torch, config.training.dtype),
            param=getattr(torch, config.training.mixed_precision_param),
            reduce=getattr(torch, config.training.mixed_precision_reduce),
        )
        self.topology = build_topology(job.spread.degrees, world)
        rows = open_rows(job, rank=world.rank, ranks=world.size)
        held_out = open_held_out(job, rank=world.rank, ranks=world.size)
        check_same(world, {**by_place(job, rows), **{each.key: each.fingerprint for each in held_out}})
        self.runner = parallelize(
            job.spec,
            job.args,
            self.topology,
            job.spread,
            loss=job.loss,
            converters=job.converters,
            device=world.device,
            seed=config.debug.seed,
            precision=self.precision,
            cpu_offload=config.training.enable_cpu_offload,
            activation_checkpoint=config.activation_checkpoint,
            compiled=config.compile if config.compile.enable else None,
            loss_chunks=config.loss.chunks,
        )
        self.graphs = Graphs() if config.compile.enable else None
        if config.model.print_after_conversion:
            logger.info("the model after its converters:\n" + "\n".join(map(str, self.runner.parts)))
        self.parameters = [parameter for _, parameter in self.runner.named_parameters]
        self.optimizer = job.optimizer.build(self.runner.named_parameters, map_whole=map_whole, parts=SpreadParts())
        self.finite = FiniteGuard(self.optimizer)
        self.peak_rates = [group["lr"] for group in self.optimizer.param_groups]

        position = DataPosition(data_stages(job, rows))
        self.progress = Progress(TrainState(), position, ScheduleStart())
        self.checkpointer = go_on(
            job, world, self.progress, parameters=self.runner.named_parameters, optimizer=self.optimizer
        )
        self.weights_changed()
        self.optimizer.register_step_post_hook(lambda *_: self.weights_changed())
        self.micro_batches = self._count_micro_batches()
        begins = position.place_stages(self.state.step, self.state.global_batch_size)
        self.mixture = blended(job, rows, begins)
        steps_left = self.steps - self.state.step
        check_share(job, rows, self.mixture, position.next_row + steps_left * self.state.global_batch_size)
        self.loader = build_loader(
            self.mixture,
            global_batch_size=self.state.global_batch_size,
            ranks=job.spread.degrees.readers,
            rank=self.topology.reader_rank,
            local_batch_size=config.training.local_batch_size,
            multiple_of=job.spread.rows_multiple,
            first_row=position.next_row,
            num_workers=config.training.dataloader.num_workers,
            prefetch_factor=config.training.dataloader.prefetch_factor,
            pin_memory=config.training.dataloader.pin_memory,
        )
        self.evaluator = build_evaluator(
            job,
            held_out,
            runner=self.runner,
            topology=self.topology,
            world=world,
            global_batch_size=self.state.global_batch_size,
        )
        self.metrics: Metrics | None = None

    @property
    def state(self) -> TrainState:
        """How far the run is."""
        return self.progress.state

    def train_step(self, batches: Sequence[Batch], num_valid: float) -> tuple[Tensor, Tensor]:
        """One update from this rank's ``batches``; returns its share of the loss, and the global gradient norm.

        ``num_valid`` counts the valid labels of the whole global batch.
        """
        loss, norm = self.gradients(batches, num_valid)
        self.update(norm)
        return loss, norm

    def gradients(self, batches: Sequence[Batch], num_valid: float) -> tuple[Tensor, Tensor]:
        """Leave new gradients in the parameters; returns what ``train_step`` returns. If they are not finite,
        NonFiniteError, or on an accelerator an optimizer that changes nothing from then on."""
        self.optimizer.zero_grad()
        loss = self.runner.forward_backward([batch.to(self.world.device) for batch in batches], num_valid)
        pipeline = self.topology.pipeline
        norm = global_norm(
            self.parameters, duplicates=self.runner.duplicates, pipeline=pipeline.group if pipeline else None
        )
        self.finite.admit(self.state.step + 1, norm)
        return loss, norm

    def update(self, norm: Tensor) -> None:
        """Change the parameters by their gradients, whose global norm is ``norm``: clip, set the rates, step."""
        clip_by_norm(self.parameters, norm, self.job.config.training.max_norm)
        self.state.step += 1
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * self._rate_factor()
        self.optimizer.step()

    def weights_changed(self) -> None:
        """Tell converters, which may keep what follows from weights; after a step of the optimizer that is done."""
        for converter in self.job.converters:
            after_step: Callable[[nn.Module], None] | None = getattr(converter, "after_step", None)
            if after_step is not None:
                for part in self.runner.parts:
                    after_step(part)

    def _rate_factor(self) -> float:
        """The share of their peak at which the rates of the newest step stand."""
        return self.job.schedule(self.state.step - self.progress.schedule_start.after_step)

    def run(self, stop: StopRequest) -> bool:
        """Train to the last step (True), or until any rank is asked to stop (False); then save."""
        try:
            return self._run(stop)
        except NonFiniteError as error:  # on all ranks alike: what is still being written is from before it
            self.state.step = error.step - 1
            try:
                if self.checkpointer is not None:
                    self.checkpointer.finish()
            except CheckpointError as unsaved:
                logger.warning(str(unsaved))
            raise

    def _run(self, stop: StopRequest) -> bool:
        config, state = self.job.config, self.state
        first_step = state.step + 1
        self.metrics = self._build_metrics()
        self._log_summary()
        collection = GarbageCollection(config.training.gc_freq)
        batches = iter(self.loader)
        clock = Clock()
        while state.step < self.steps:
            rows = clock.next_of(batches)
            own_valid = sum(batch.num_valid() for batch in rows)
            # That somebody wants to stop travels with the count, so that all ranks stop at the same step.
            counted, stopping = self.world.sum([own_valid, float(bool(stop))])
            if stopping:
                break
            num_valid = counted / self.topology.degrees.copies
            seed_step(config.debug.seed, state.step + 1, self.topology.reader_rank, self.world.device)
            loss, norm = self.train_step(rows, max(num_valid, 1.0))
            state.tokens_seen += state.global_batch_size * config.training.seq_len
            self.progress.position.next_row += state.global_batch_size
            clock.steps += 1
            if self.graphs is not None:
                self.graphs.look("training", state.step)
            logs = state.step in (first_step, self.steps) or state.step % config.metrics.log_freq == 0
            validates = self.evaluator is not None and self.evaluator.is_due(state.step)
            saves = self.checkpointer is not None and self.checkpointer.is_due(state.step)
            if logs or validates or saves:
                self.finite.check()
            if logs:
                self._log(float(loss), float(norm), own_valid, num_valid, clock)
                clock = Clock()
            if state.step == first_step:
                self.world.set_timeout(config.comm.train_timeout_seconds, list(self.topology.groups()))
            if self.evaluator is not None and validates:
                with clock.paused(self.world.device):
                    for stats in self.evaluator.round(state.step, stop):
                        self.metrics.validated(stats)
                if self.graphs is not None:
                    self.graphs.look("validation", state.step)
            if self.checkpointer is not None and state.step < self.steps:
                self.checkpointer.save(state.step)
            collection.step(state.step)
        collection.close()
        self.finite.check()
        if self.checkpointer is not None:
            self.checkpointer.save(state.step, last=True)
            if state.step >= self.steps:
                self.checkpointer.export(state.step)
        return state.step >= self.steps

    def close(self) -> None:
        """Release loader workers and sinks."""
        self.loader.close()
        if self.evaluator is not None:
            self.evaluator.close()
        if self.checkpointer is not None:
            self.checkpointer.close()
        if self.metrics is not None:
            self.metrics.close()

    # Wiring

    def _count_micro_batches(self) -> int:
        training, rows = self.job.config.training, self.state.global_batch_size
        try:
            return micro_batches(self.job.spread, rows, training.local_batch_size)
        except ConfigError as error:
            # It was checked before the start, but for a global batch that the checkpoint has kept.
            raise ConfigError(error.key, f"the checkpoint's global batch of {rows} {error.problem}") from None

    def _log_summary(self) -> None:
        """What is about to run, in a few lines."""
        config, device = self.job.config, self.world.device
        training, spread, precision = config.training, self.job.spread, self.precision
        number = self.loader.micro_batches
        shares = "1 batch" if number == 1 else f"{number} batches"
        logger.info(
            f"torchtitan {__version__}, torch {torch.__version__}, {describe(device)}: {config.job.description}"
        )
        logger.info(
            f"{config.model.name} {config.model.flavor}: {self.job.spec.count_parameters(self.job.args):,} parameters "
            f"in {_short(precision.storage)}, computed in {_short(precision.param)}, reduced in "
            f"{_short(precision.reduce)}"
        )
        tokenizer, rows = self.job.tokenizer, self.job.args.vocab_size
        if tokenizer is not None:
            logger.info(f"tokenizer {tokenizer.name}: ids up to {tokenizer.vocab_size - 1} of {rows}")
            if 2 * tokenizer.vocab_size < rows:
                logger.warning(
                    f"most of the model's {rows} rows stand for no id of this tokenizer; is model.hf_assets_path "
                    "(or tokenizer.name) the one that is meant?"
                )
        ranks = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
        logger.info(
            f"{ranks}: {spread.degrees}; global batch "
            f"{self.state.global_batch_size} × {training.seq_len} tokens, {shares} a rank; "
            f"steps {self.state.step + 1} to {training.steps}"
        )
        if spread.pipeline is not None:
            logger.info(describe_pipeline(spread.pipeline, self.micro_batches))
        if device.type == "cpu":
            logger.info(f"memory allocator: {describe_allocator(os.environ)}")
        if device.type == "cpu" and precision.param == torch.bfloat16 and not has_fast_bfloat16():
            logger.warning(
                'this CPU is slow in bfloat16; training.mixed_precision_param = "float32" is many times faster here'
            )

    def _build_metrics(self) -> Metrics:
        config, device = self.job.config, self.world.device
        by_key = config.metrics.peak_tflops
        peak, source = peak_flops(device, self.precision.param) if by_key is None else (by_key * 1e12, "by key")
        logger.info(
            f"peak of a device: {source}; mfu counts attention in full, mfu_causal the half a causal mask leaves"
        )
        operations = self.job.spec.flops(self.job.args, config.training.seq_len)
        files = RunFiles(Path(config.job.dump_folder), self.state.step)
        return Metrics(
            build_sinks(self.job.sinks if self.world.rank == 0 else {}, files),
            devices=self.world.size,
            flops_per_token=operations.full,
            flops_per_token_causal=operations.causal,
            peak_flops=peak,
            last_step=self.steps,
            memory=lambda: memory(device),
        )

    def _log(self, loss: float, norm: float, own_valid: int, num_valid: float, clock: Clock) -> None:
        losses = self._by_reader(loss / self.topology.degrees.tensor)  # tensor peers hold the same, others parts
        valid = self._by_reader(own_valid / self.topology.degrees.copies)
        means = [loss * num_valid / n for loss, n in zip(losses, valid, strict=True) if n]
        assert self.metrics is not None
        self.metrics.write(
            StepStats(
                step=self.state.step,
                loss=sum(losses),
                max_loss=max(means, default=None),
                grad_norm=norm,
                lr=self.job.config.optimizer.lr * self._rate_factor(),
                tokens_seen=self.state.tokens_seen,
                tokens=clock.steps * self.state.global_batch_size * self.job.config.training.seq_len,
                steps=clock.steps,
                seconds=clock.seconds,
                data_seconds=clock.data_seconds,
                source_tokens=self._source_tokens(),
            )
        )

    def _source_tokens(self) -> dict[str, int]:
        """How many tokens of each source the run has been given, by the blend of its data."""
        if not self.job.config.data.sources:
            return {}
        counts = self.mixture.counts(self.progress.position.next_row)
        return {name: rows * self.job.config.training.seq_len for name, rows in counts.items()}

    def _by_reader(self, value: float) -> list[float]:
        """The sum of ``value`` over the ranks that read the same rows, for each such group of ranks."""
        values = [0.0] * self.topology.degrees.readers
        values[self.topology.reader_rank] = value
        return self.world.sum(values)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
