"""Where the record of a logged step goes: the console, ``metrics.jsonl``, TensorBoard, W&B, or a lab's own.

What stands in a record is decided in ``metrics.py``; a package that only one sink needs is imported when it is built.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from torchtitan.config import toml
from torchtitan.errors import ConfigError
from torchtitan.log import logger
from torchtitan.observe.lines import JsonLines
from torchtitan.registry import Registry
from torchtitan.secrets import hidden

Record = dict[str, float | None]
"""The numbers of one logged step by name; None is what does not apply. A sink leaves it as it is."""


ValidationRecord = dict[str, Any]
"""``step``, ``set`` (its name, None for the only one), ``loss``, ``tokens`` that it is the mean of, ``seconds``, and
``tps``, memory and ``wall_time`` as in a ``Record``."""


class Sink(Protocol):
    """Takes records. An OSError costs lines and a warning, any other error ends the run.

    One that has a method ``validated(record: ValidationRecord)`` is given what validation finds on each set as well.
    """

    def write(self, record: Record) -> None:
        """Take the record of one logged step."""

    def close(self) -> None:
        """No record follows."""


@dataclass(frozen=True)
class RunFiles:
    """The run's folder, and the step it goes on after (0 for a new run)."""

    folder: Path
    resumed_step: int


SINKS: Registry[Callable[..., Sink]] = Registry("metric sink", home=__name__, receives=("run",))
"""Of builders ``(run: RunFiles, *, options) -> Sink``. Only rank 0 builds and uses sinks."""

_PACKAGES = {"tensorboard": "metrics.enable_tensorboard", "wandb": "metrics.enable_wandb"}


def build_sinks(builders: Mapping[str, Callable[[RunFiles], Sink]], run: RunFiles) -> list[Sink]:
    """The named sinks, from builders whose options are bound; ConfigError where the run's folder cannot be written."""
    sinks = []
    for name, build in builders.items():
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            sinks.append(build(run))
        except OSError as error:
            raise ConfigError("job.dump_folder", f"metric sink {name!r} cannot write there: {error}") from error
    return sinks


def check_packages(names: Iterable[str]) -> None:
    """ConfigError if the package that one of these sinks stands on is not installed; imports nothing."""
    for name in names:
        # A folder of that name in the working directory, wandb's own for one, has a spec without an origin.
        if name in _PACKAGES and getattr(importlib.util.find_spec(name), "origin", None) is None:
            raise ConfigError(_PACKAGES[name], f"needs a package that is not installed: pip install {name}")


class Console:
    """One line a record through the log: TorchTitan's fields in their order and colors, then the time left."""

    def __init__(self, *, color: bool) -> None:
        self.color = color

    def write(self, record: Record) -> None:
        logger.info(console_line(record, color=self.color))

    def validated(self, record: ValidationRecord) -> None:
        logger.info(validation_line(record, color=self.color))

    def close(self) -> None:
        pass


@SINKS.register("console")
def console(
    run: RunFiles,
    *,
    color: Annotated[bool, Field(description="color the fields, on a terminal and unless NO_COLOR is set")] = True,
) -> Sink:
    """Lines in the log; FORCE_COLOR colors them through a pipe too (no-color.org, force-color.org)."""
    on_terminal = bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()
    return Console(color=color and on_terminal and not os.environ.get("NO_COLOR"))


def console_line(record: Record, *, color: bool) -> str:
    """The record for the eye. Whoever reads TorchTitan's lines by a pattern can read these."""
    mfu = record["mfu"]
    fields = (
        ("31", f"step: {record['step']:2}"),
        ("32", f"loss: {record['loss']:8.5f}"),
        ("38;5;208", f"grad_norm: {record['grad_norm']:7.4f}"),
        ("38;5;80", f"memory: {record['memory_gib']:5.2f}GiB({record['memory_percent']:.2f}%)"),
        ("34", f"tps: {record['tps']:,.0f}"),
        ("36", f"tflops: {record['tflops']:,.2f}"),
        ("35", "mfu: N/A" if mfu is None else f"mfu: {mfu:.2f}%"),
        ("39", f"time left: {_duration(record['seconds_left'] or 0.0)}"),
    )
    return _colored(fields, color)


def validation_line(record: ValidationRecord, *, color: bool) -> str:
    """The record of a set for the eye: TorchTitan's line, and the name of the set where it has one."""
    fields = [
        ("33", f"validate step: {record['step']:2}"),
        *([("33", f"set: {record['set']}")] if record["set"] is not None else []),
        ("32", f"loss: {record['loss']:7.4f}"),
        ("38;5;80", f"memory: {record['memory_gib']:5.2f}GiB({record['memory_percent']:.2f}%)"),
        ("34", f"tps: {record['tps']:,.0f}"),
    ]
    return _colored(fields, color) + ("\033[39m" if color else "")


def _colored(fields: Iterable[tuple[str, str]], color: bool) -> str:
    return "  ".join(f"\033[{code}m{text}" if color else text for code, text in fields)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"


METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
FIELDS = (
    *("step", "loss", "max_loss", "grad_norm", "lr", "tokens_seen", "tps", "tflops", "mfu", "mfu_causal"),
    *("memory_gib", "data_loading_seconds", "step_seconds", "wall_time"),
)
"""Of a line of metrics.jsonl, in this order; after them come the SOURCE_TOKENS of a blend of data."""
SOURCE_TOKENS = "source_tokens/"
"""Begins the names, in a record and everywhere it goes, of the tokens that have come from each source."""
VALIDATION_FIELDS = ("step", "set", "loss", "tokens", "seconds")
"""Of a line of validation.jsonl."""


class Jsonl:
    """A line a record, in one file for steps and one for validation, of which neither holds a step after that which the
    run goes on after."""

    def __init__(self, run: RunFiles) -> None:
        self._steps = JsonLines(run.folder / METRICS_FILE, run.resumed_step)
        self._steps.open()  # a run without validation has no file of it, but what it resumes may have one to be cut
        self._validations = JsonLines(run.folder / VALIDATION_FILE, run.resumed_step)

    def write(self, record: Record) -> None:
        fields = (*FIELDS, *(name for name in record if name.startswith(SOURCE_TOKENS)))
        self._steps.append({name: record[name] for name in fields})

    def validated(self, record: ValidationRecord) -> None:
        self._validations.append({name: record[name] for name in VALIDATION_FIELDS})

    def close(self) -> None:
        self._steps.close()
        self._validations.close()


@SINKS.register("jsonl")
def jsonl(run: RunFiles) -> Sink:
    """metrics.jsonl and validation.jsonl in the run's folder, one object a line."""
    return Jsonl(run)


SCALARS = {
    "loss_metrics/global_avg_loss": "loss",
    "loss_metrics/global_max_loss": "max_loss",
    "grad_norm": "grad_norm",
    "throughput(tps)": "tps",
    "tflops": "tflops",
    "mfu(%)": "mfu",
    "time_metrics/end_to_end(s)": "step_seconds",
    "time_metrics/data_loading(s)": "data_loading_seconds",
    "time_metrics/data_loading(%)": "data_loading_percent",
    "memory/max_active(GiB)": "memory_active_gib",
    "memory/max_active(%)": "memory_active_percent",
    "memory/max_reserved(GiB)": "memory_gib",
    "memory/max_reserved(%)": "memory_percent",
    "memory/num_alloc_retries": "alloc_retries",
    "memory/num_ooms": "ooms",
    "n_tokens_seen": "tokens_seen",
    "lr": "lr",
}
"""TorchTitan's names of scalars, so that its users' dashboards go on working → ours in a record."""


VALIDATION_SCALARS = {
    "loss": "loss",
    "throughput(tps)": "tps",
    "memory/max_active(GiB)": "memory_active_gib",
    "memory/max_active(%)": "memory_active_percent",
    "memory/max_reserved(GiB)": "memory_gib",
    "memory/max_reserved(%)": "memory_percent",
}
"""The same of a set's record, below ``validation_metrics/`` and its name if it has one."""


def scalars(record: Record) -> dict[str, float]:
    """What of the record applies, by the names of dashboards."""
    sources = {name: name for name in record if name.startswith(SOURCE_TOKENS)}
    return {tag: value for tag, name in (SCALARS | sources).items() if (value := record[name]) is not None}


def validation_scalars(record: ValidationRecord) -> dict[str, float]:
    """What of the record of a set applies, by the names of dashboards."""
    place = "validation_metrics" if record["set"] is None else f"validation_metrics/{record['set']}"
    return {f"{place}/{tag}": record[name] for tag, name in VALIDATION_SCALARS.items() if record[name] is not None}


class TensorBoard:
    """Event files in a folder named by the time; a resumed run goes on in the newest one and hides what it repeats."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = _time_folder(folder, new=resumed_step == 0)
        self._writer = SummaryWriter(str(self.folder), purge_step=resumed_step + 1, flush_secs=10)

    def write(self, record: Record) -> None:
        self._add(scalars(record), record)

    def validated(self, record: ValidationRecord) -> None:
        self._add(validation_scalars(record), record)

    def _add(self, found: dict[str, float], record: dict[str, Any]) -> None:
        for tag, value in found.items():
            self._writer.add_scalar(tag, value, record["step"], walltime=record["wall_time"])

    def close(self) -> None:
        self._writer.close()


@SINKS.register("tensorboard")
def tensorboard(
    run: RunFiles,
    *,
    folder: Annotated[str, Field(description="folder of the event files, in the run's folder")] = "tb",
) -> Sink:
    """TensorBoard event files with TorchTitan's scalar names."""
    check_packages(["tensorboard"])
    return TensorBoard(run.folder / folder, run.resumed_step)


def _time_folder(parent: Path, *, new: bool) -> Path:
    names = [path.name for path in parent.glob("*") if re.fullmatch(r"\d{8}-\d{4}", path.name)]
    return parent / (max(names) if names and not new else time.strftime("%Y%m%d-%H%M"))


class WandB:
    """A run of Weights & Biases, described by the environment; the job's config is that of its config.toml."""

    def __init__(self, folder: Path) -> None:
        import wandb

        def env(name: str) -> str | None:
            return os.environ.get(f"WANDB_{name}") or None

        config = folder / "config.toml"
        argv = sys.argv
        sys.argv = [hidden(word) for word in argv]  # it reports them
        try:
            self._run: Any = wandb.init(
                dir=str(folder),
                config=toml.parse(config.read_text()) if config.exists() else None,
                entity=env("TEAM"),
                project=env("PROJECT") or "torchtitan",
                name=env("RUN_NAME"),
                id=env("RUN_ID"),
                notes=env("RUN_NOTES"),
                tags=[tag.strip() for tag in (env("RUN_TAGS") or "").split(",") if tag.strip()] or None,
                group=env("RUN_GROUP"),
                job_type=env("RUN_JOB_TYPE"),
                resume_from=env("RESUME_FROM"),
                fork_from=env("FORK_FROM"),
            )
        except wandb.Error as error:
            raise ConfigError(
                "metrics.enable_wandb",
                f"wandb does not start: {error}; WANDB_MODE=offline needs neither key nor network",
            ) from error
        finally:
            sys.argv = argv

    def write(self, record: Record) -> None:
        self._run.log(scalars(record), step=record["step"])

    def validated(self, record: ValidationRecord) -> None:
        self._run.log(validation_scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


@SINKS.register("wandb")
def wandb(run: RunFiles) -> Sink:
    """Weights & Biases with TorchTitan's scalar names; WANDB_TEAM, WANDB_PROJECT, WANDB_RUN_NAME … say where."""
    check_packages(["wandb"])
    return WandB(run.folder)
