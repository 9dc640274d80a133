"""From a job to the rows that it trains on: its sources opened, cut into rows, and blended.

Which rows a rank takes at a step is in ``data/loader.py``; where a run stands among them, in ``state.py``.
"""

from collections.abc import Mapping, Sequence

from torchtitan.data.blend import Source
from torchtitan.data.files import KEY
from torchtitan.data.rows.build import build_rows
from torchtitan.data.rows.foreign import in_their_order, source_rows
from torchtitan.data.rows.mixture import Mixture, split_fingerprint
from torchtitan.data.rows.rows import BlendedRows, SourceRows, ToldSource
from torchtitan.data.tokens.store import Tokens
from torchtitan.distributed.world import World
from torchtitan.errors import ConfigError
from torchtitan.log import logger
from torchtitan.resolve.job import Job
from torchtitan.state import DataStage


def open_rows(job: Job, *, rank: int = 0, ranks: int = 1) -> dict[str, SourceRows]:
    """The rows of each source by its name; all ``ranks`` share the work where text is to be tokenised first."""
    data, training, sources = job.config.data, job.config.training, job.blend.sources
    if data.order == "source":
        rows = source_rows(
            sources,
            job.blend.stages[0].weights,
            vocab_size=job.args.vocab_size,
            seq_len=training.seq_len,
            samples=training.steps * training.global_batch_size,
            cache_folder=data.cache_folder,
        )
    else:
        rows = {name: _native_rows(job, source, rank=rank, ranks=ranks) for name, source in sources.items()}
    if not data.sources:
        return rows
    return {name: ToldSource(rows[name], source.told_as, name) for name, source in sources.items()}


def _native_rows(job: Job, source: Source, *, rank: int, ranks: int) -> SourceRows:
    tokens = open_source(job, source, rank=rank, ranks=ranks)
    with source.told():
        return build_rows(
            tokens,
            packing=job.config.data.packing,
            seq_len=job.config.training.seq_len,
            shuffle=job.config.data.shuffle,
            seed=job.config.debug.seed,
            cache_folder=job.config.data.cache_folder,
        )


def open_source(job: Job, source: Source, *, rank: int, ranks: int) -> Tokens:
    """The tokens of a data set of ``job``."""
    folder = job.config.data.cache_folder
    return source.open(job.encoding, job.args.vocab_size, cache_folder=folder, rank=rank, ranks=ranks)


def data_stages(job: Job, rows: Mapping[str, SourceRows]) -> list[DataStage]:
    """What tells the stages of the blend apart from others."""
    return [DataStage(stage.from_step, split_fingerprint(stage.weights, rows), stage.key) for stage in job.blend.stages]


def blended(job: Job, rows: Mapping[str, SourceRows], begins: Sequence[int]) -> BlendedRows:
    """The rows of all sources in their global order, given the row that each stage begins with."""
    data, training = job.config.data, job.config.training
    if data.order == "source":
        return in_their_order(
            job.blend.sources,
            rows,
            job.blend.stages[0].weights,
            samples=training.steps * training.global_batch_size,
            cache_folder=data.cache_folder,
        )
    stages = zip(begins, job.blend.stages, strict=True)
    return Mixture(rows, [(begin, stage.weights) for begin, stage in stages])


def by_place(job: Job, rows: Mapping[str, SourceRows]) -> dict[str, str]:
    """The fingerprint of each source by the key that says where its data lie."""
    return {source.told_as.get(KEY, KEY): rows[name].fingerprint for name, source in job.blend.sources.items()}


def check_same(world: World, fingerprints: Mapping[str, str]) -> None:
    """ConfigError, on all ranks, if they do not hold the same data; ``fingerprints`` of rows by the key that says where
    the data lie."""
    first, *others = world.gather(dict(fingerprints))
    for rank, theirs in enumerate(others, start=1):
        for key, fingerprint in first.items():
            if theirs[key] != fingerprint:
                raise ConfigError(
                    key, f"rank {rank} found other data there than rank 0: is each machine's copy the same, and whole?"
                )


def check_share(job: Job, rows: Mapping[str, SourceRows], mixture: BlendedRows, last_row: int) -> None:
    """Look at what the first ``last_row`` rows take of each source: ConfigError if they read one more often than
    ``data.max_epochs``, and a warning of those that give none."""
    data, most = job.config.data, job.config.data.max_epochs
    counts = mixture.counts(last_row) if most is not None or data.sources else {}
    if idle := [name for name, count in counts.items() if count == 0]:
        logger.warning(f"no row of this run comes from {', '.join(idle)}: by weight or from_step their turn is later")
    if most is None:
        return
    for name, count in counts.items():
        if count > most * (held := rows[name].rows_per_epoch):
            raise ConfigError(
                "data.max_epochs",
                f"{name} has {held:,} rows an epoch, and the last step would be at its row {count:,}; take fewer "
                "steps, more data or another weight",
            )
