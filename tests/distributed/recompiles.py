"""How many graphs a run compiles: steps whose last batch is not full, and rounds of validation on rows of another
number and length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.runs import metrics, tiny_argv
from torchtitan.config import load_config
from torchtitan.distributed.compile import graphs_made
from torchtitan.distributed.world import World
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

CASES: dict[str, list[str]] = {
    "one process": [],
    "tp 2": ["--parallelism.tensor_parallel_degree=2"],
    "pp 2": ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=2"],
    "cp 2": ["--parallelism.context_parallel_degree=2"],
    "dp 2": [],
}


@dataclass
class Compiled:
    """Steps and rounds of validation of a run, the graphs that it made, and those of them that it should not have."""

    steps: int
    rounds: int
    graphs: int
    again: int


def run_steps(world: World, folder: Path, words: Sequence[str], steps: int, backend: str) -> Compiled:
    """Rows of 7 in batches of 4, so that some are filled up; 5 rows of validation, in batches of 2."""
    argv = tiny_argv(
        folder,
        f"--training.steps={steps}",
        "--training.global_batch_size=7",
        "--training.local_batch_size=4",
        "--validation.enable",
        "--validation.dataset=jsonl",
        f"--validation.dataset_path={folder / 'text.jsonl'}",
        "--validation.freq=10",
        "--validation.steps=1",
        "--validation.global_batch_size=5",
        "--validation.local_batch_size=2",
        "--validation.seq_len=32",
        "--compile.enable",
        f"--compile.backend={backend}",
        *words,
    )
    config = load_config(argv)
    Path(config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    before = graphs_made()
    trainer = Trainer(resolve_job(config, world.size), world)
    trainer.run(StopRequest(None))
    trainer.close()
    done = metrics(Path(config.job.dump_folder)) if world.rank == 0 else []
    rounds = len(_lines(Path(config.job.dump_folder) / "validation.jsonl"))
    assert trainer.graphs is not None
    return Compiled(len(done), rounds, graphs_made() - before, trainer.graphs.again)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
