"""``python -m torchtitan.convert``: a Hugging Face folder to a checkpoint, and a checkpoint to such a folder.

What the tensors are called is in ``models/huggingface.py``, how files are read and written in ``checkpoint/``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from torchtitan.checkpoint.manifest import MANIFEST, Manifest, damage
from torchtitan.checkpoint.places import free_bytes, is_local, place, shown_bytes, storage_errors
from torchtitan.checkpoint.storage import BEING_WRITTEN, METADATA, find_step, step_folders
from torchtitan.command_line import Parser
from torchtitan.config import describe_error, load_config
from torchtitan.config.overrides import split_overrides
from torchtitan.config.toml import key_text, parse, value_text
from torchtitan.errors import CheckpointError, ConfigError, one_line
from torchtitan.log import init_logger
from torchtitan.platforms import check_platform

if TYPE_CHECKING:  # torch costs seconds, and help is given before
    from upath import UPath

    from torchtitan.models.spec import ModelSpec

_CONFIG = "config.toml"
_DTYPES = ("float32", "bfloat16", "float16")
_COMMANDS = {
    "from-hf": """\
IN    a folder of this machine with config.json and safetensors files (pickles are never read)
OUT   a new checkpoint, to be named as checkpoint.initial_load_path; its config.toml holds [model]
""",
    "to-hf": """\
IN    a step's folder, or a run's, of which the newest complete step is taken
OUT   a new folder that transformers reads
""",
}
_EPILOG = """
A step that TorchTitan wrote does not say what model it holds: say it by --job.config_file FILE and --section.key VALUE,
as for training. For a family of your own, both take --job.imports. OUT may be a URL, such as s3://bucket/run.

exit codes: 0 done, 1 failed, 2 wrong command or input. Whatever ends a conversion before its end, nothing lies at OUT.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit code."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    init_logger()
    started = time.monotonic()
    try:
        check_platform()
        convert = _from_hf if arguments.command == "from-hf" else _to_hf
        done = convert(arguments, overrides)
        print(f"{arguments.OUT}: {done}, {time.monotonic() - started:.0f} s", file=sys.stderr)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code, line = _end(error, arguments.OUT)
        print(line, file=sys.stderr)
        return code


def _end(error: BaseException, out: str) -> tuple[int, str]:
    """Exit code and line for what ended a conversion; raises it where it is none that a person can mend."""
    cause: BaseException | None = error
    while cause is not None:  # torch's writer says in its place that its file is not whole
        if isinstance(cause, KeyboardInterrupt):
            return 1, f"interrupted, nothing is left at {out}"
        cause = cause.__context__
    if isinstance(error, ConfigError):
        return 2, describe_error(error)
    if isinstance(error, CheckpointError):
        return 2, one_line(error)
    if isinstance(error, OSError):
        return 1, f"failed, nothing is left at {out}: {one_line(error)}"
    raise error


def _parser() -> Parser:
    parser = Parser(
        prog="python -m torchtitan.convert",
        description="Hugging Face weights to a checkpoint, and back.",
        epilog="\n".join(f"{name} IN OUT\n{what}" for name, what in _COMMANDS.items()) + _EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="from-hf|to-hf")
    for name, what in _COMMANDS.items():
        command = commands.add_parser(name, epilog=what + _EPILOG, allow_abbrev=False)
        command.add_argument("IN", help="what to read")
        command.add_argument("OUT", help="what to write: a folder that is not there, or empty")
        command.add_argument("--dtype", choices=_DTYPES, help="type of the weights in OUT (default: what IN has)")
        if name == "to-hf":
            command.add_argument(
                "--shard-size-gb",
                type=_size,
                default=2.0,
                metavar="GB",
                help="largest file, in 10^9 bytes (default: 2)",
            )
            command.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="copy the tokenizer's files from it")
    return parser


def _size(text: str) -> float:
    size = float(text)
    if not 1e-9 <= size < math.inf:
        raise ValueError
    return size


def _from_hf(arguments: argparse.Namespace, overrides: Sequence[str]) -> str:
    _import_parts(overrides, "the folder says what model it holds")
    import torch

    from torchtitan.checkpoint.dcp.writer import write_lazily
    from torchtitan.checkpoint.huggingface.export import Overflow, write_file
    from torchtitan.checkpoint.huggingface.files import WeightFolder
    from torchtitan.checkpoint.huggingface.load import Source, args_of
    from torchtitan.models.huggingface import family_of
    from torchtitan.models.spec import MODELS

    weights = WeightFolder(arguments.IN)
    try:
        family = family_of(weights.config)
    except ConfigError as error:
        raise ConfigError(None, f"{weights.folder}: {error.problem}") from None
    spec = MODELS.get(family)
    flavor, args = _as_flavor(spec, args_of(weights, spec))
    source = Source(weights, spec, args)
    kinds = set.union(*map(source.dtypes, source.shapes))
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else kinds.pop() if len(kinds) == 1 else torch.float32
    total = sum(shape.numel() for shape in source.shapes.values()) * dtype.itemsize
    overflow = Overflow()

    @functools.cache  # tensors of one shape share their memory, which the system would not soon get back
    def room(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    with _new_folder(arguments.OUT, total) as folder, _progress(total) as wrote:

        def load(name: str) -> torch.Tensor:
            tensor = room(source.shapes[name], max(source.dtypes(name), key=lambda kind: kind.itemsize))
            source.fill(name, tensor)
            cast = tensor if tensor.dtype is dtype else room(tensor.shape, dtype).copy_(tensor)
            overflow.look(name, tensor, cast)
            wrote(cast.nbytes)
            return cast

        files = write_lazily(folder, source.shapes, dtype, load)
        says = dataclasses.asdict(args)
        assets = weights.folder.absolute() if (weights.folder / "tokenizer.json").is_file() else None
        toml = _model_toml(family, flavor, says, dataclasses.asdict(spec.flavors[flavor]), assets)
        files[_CONFIG] = write_file(folder / _CONFIG, [toml.encode()])
        Manifest(0, {"model": says}, files).write(folder)
    return f"{family}, {shown_bytes(total)} of {str(dtype).removeprefix('torch.')}"


def _as_flavor(spec: ModelSpec, args: Any) -> tuple[str, Any]:
    """The flavor that is the same model as ``args``, and how it says them; else one to start from, and ``args``."""
    from torchtitan.models.huggingface import to_config

    for name, flavor in spec.flavors.items():
        if to_config(spec, flavor) == to_config(spec, args):
            return name, flavor
    return "debugmodel" if "debugmodel" in spec.flavors else next(iter(spec.flavors)), args


def _model_toml(
    family: str, flavor: str, args: Mapping[str, Any], usual: Mapping[str, Any], assets: Path | None = None
) -> str:
    """[model] with all of ``args``; what is None both there and in the flavor's ``usual`` ones need not be said."""

    def lines(name: str, table: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
        yield f"\n[{name}]"
        inner = {key: value for key, value in table.items() if isinstance(value, dict)}
        for key, value in table.items():
            if key not in inner and not (value is None and usual[key] is None):
                yield f"{key_text(key)} = {value_text(value)}" if value is not None else f'{key_text(key)} = "none"'
        for key, value in inner.items():
            yield from lines(f"{name}.{key_text(key)}", value, usual[key])

    head = f"[model]\nname = {value_text(family)}\nflavor = {value_text(flavor)}"
    if assets is not None:
        head += f"\nhf_assets_path = {value_text(str(assets))}"
    return "\n".join([head, *lines("model.args", args, usual), ""])


def _to_hf(arguments: argparse.Namespace, overrides: Sequence[str]) -> str:
    import torch

    from torchtitan.checkpoint.dcp.reader import Reader
    from torchtitan.checkpoint.huggingface.export import TOKENIZER_FILES, export_plan, write_files, write_rest

    tokenizer = arguments.tokenizer
    if tokenizer is not None and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError("--tokenizer", f"{tokenizer} is no folder with tokenizer.json or the like")
    step = find_step(arguments.IN, key=arguments.IN)
    manifest = Manifest.read(step) if (step / MANIFEST).is_file() else None
    _check(step, manifest, (METADATA, _CONFIG))
    family, spec, args = _model_of(step, manifest, overrides)
    plan = export_plan(
        spec,
        args,
        reader := Reader(step),
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        shard_bytes=int(arguments.shard_size_gb * 1e9),
    )
    _check(step, manifest)
    number = re.fullmatch(r"step-(\d+)", step.name)
    with _new_folder(arguments.OUT, plan.bytes) as folder, _progress(plan.bytes) as wrote:
        files = write_files(plan, reader, folder, plan.files, wrote=wrote)
        files |= write_rest(plan, folder, tokenizer)
        done = manifest.step if manifest is not None else int(number[1]) if number else 0
        Manifest(done, {"model": dataclasses.asdict(args)}, files).write(folder)
    return f"{step} as {family}, {shown_bytes(plan.bytes)} of {plan.config['dtype']}, files: {len(plan.files)}"


def _check(step: UPath, manifest: Manifest | None, names: Sequence[str] | None = None) -> None:
    """CheckpointError where one of the files ``names`` (None: of all) is not what the manifest says."""
    if manifest is not None:
        listed = manifest.files.keys() if names is None else manifest.files.keys() & names
        if problem := damage(step, manifest, sorted(listed)):
            raise CheckpointError(problem)


def _model_of(step: UPath, manifest: Manifest | None, overrides: Sequence[str]) -> tuple[str, ModelSpec, Any]:
    """Name, family and hyper-parameters of the model in ``step``: what it says itself, else what ``overrides`` say."""
    says = manifest is not None and _CONFIG in manifest.files
    if says:
        _import_parts(overrides, f"{step} says what model it holds")
    elif not any(word.startswith(("--job.config", "--model.")) for word in overrides):
        raise ConfigError(
            None, f"{step} does not say what model it holds; add --job.config_file FILE, the configuration of its run"
        )
    from torchtitan.models.spec import MODELS
    from torchtitan.resolve.model import resolve_args

    if not says:
        model = load_config(overrides).model
        spec = MODELS.get(model.name, key="model.name")
        return model.name, spec, resolve_args(spec, model.flavor, model.args)
    try:
        table = parse((step / _CONFIG).read_text())["model"]
        family, flavor = str(table["name"]), table["flavor"]
        if family not in MODELS.names():
            raise ConfigError(
                None, f"unknown model {family!r}; if it is one of yours, add --job.imports with its module"
            )
        spec = MODELS.get(family)
        flavor = flavor if flavor in spec.flavors else next(iter(spec.flavors))
        assert manifest is not None
        return family, spec, resolve_args(spec, flavor, manifest.state.get("model", table.get("args", {})))
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{step / _CONFIG}: {one_line(error)}") from None


def _import_parts(overrides: Sequence[str], why: str) -> None:
    """Import what ``--job.imports`` names; ConfigError for any other key, since ``why``."""
    for word in overrides:
        name = word.partition("=")[0]
        if name.startswith("--") and name != "--job.imports":
            raise ConfigError(name, f"is not taken here: {why}")
    load_config(overrides)


@contextlib.contextmanager
def _new_folder(name: str, total: int) -> Iterator[UPath]:
    """Where to write what is to lie in ``name`` once it is whole; ConfigError where something is there already or
    ``total`` bytes find no room."""
    folder = place(name, key=name)
    if is_local(folder):
        folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(name, "is there already and is not an empty folder; choose another OUT")
    free = free_bytes(folder)
    if free is not None and free < total:
        raise ConfigError(name, f"needs {shown_bytes(total)}, and {shown_bytes(free)} are free there")
    folders = step_folders(folder.parent)
    unfinished = folders.partial(folder)
    with storage_errors(folder):
        if is_local(folder) and unfinished.exists() and not (unfinished / BEING_WRITTEN).exists():
            raise ConfigError(
                name, f"is written as {unfinished} at first, and that is there already; choose another OUT"
            )
        folders.prepare(folder)
        try:
            (unfinished / BEING_WRITTEN).write_text("")  # ours to delete, if this is interrupted
            yield unfinished
            (unfinished / BEING_WRITTEN).unlink()
            if is_local(folder) and folder.exists():
                folder.rmdir()
            folders.commit(folder)
        except BaseException:
            folders.discard(folder)
            raise


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """Within, takes the bytes that are done; a bar on a terminal, and nothing elsewhere."""
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
