"""How far float8 is from bfloat16 in training: the debug model on the text that comes with Python, by each recipe."""

from collections.abc import Sequence
from pathlib import Path

from tests.runs import metrics
from torchtitan.config import load_config
from torchtitan.distributed.world import World
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer
from torchtitan.transforms import float8, mx

_LAST = 10
"""Steps whose mean loss is the loss at the end: that of one step is mostly that of its rows."""


def _emulated(converter: str, recipe: str) -> tuple[str, ...]:
    return (f"--model.converters={converter}", f"--{converter}.emulate", f"--{converter}.recipe_name={recipe}")


RECIPES = {
    **{recipe: _emulated(float8.NAME, recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")},
    **{recipe: _emulated(mx.NAME, recipe) for recipe in ("mxfp8_cublas", "mxfp8_cublas_rceil")},
}


def final_loss(world: World, folder: Path, dtype: str, recipe: str | None, steps: int, *more: str) -> float:
    """The mean loss of the last steps, computed in ``dtype``; whatever the recipe, of the same rows from the same
    weights."""
    config = load_config(
        [
            "--job.config_file=debug_model",
            f"--job.dump_folder={folder}",
            f"--training.steps={steps}",
            f"--training.mixed_precision_param={dtype}",
            "--metrics.log_freq=1",
            "--metrics.no_enable_tensorboard",
            "--metrics.peak_tflops=1",
            "--checkpoint.no_enable",
            *more,
            *(RECIPES[recipe] if recipe is not None else ()),
        ]
    )
    folder.mkdir(parents=True)
    trainer = Trainer(resolve_job(config, world.size), world)
    trainer.run(StopRequest(None))
    trainer.close()
    return sum(line["loss"] for line in metrics(folder)[-_LAST:]) / _LAST


def final_losses(
    world: World, folder: Path, dtype: str, recipes: Sequence[str | None], steps: int, *more: str
) -> list[float]:
    """Of each of ``recipes`` in turn; None: of ``dtype`` alone."""
    return [final_loss(world, folder / str(recipe), dtype, recipe, steps, *more) for recipe in recipes]
