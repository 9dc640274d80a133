"""The house as drawn in docs/tour.md: who may import whom, which words stay where, where private APIs are."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchtitan"
FILES = sorted(PACKAGE.rglob("*.py"))

# Rooms by floor: a room imports from floors below it, and from its own room.
FLOORS = [
    {"errors", "registry", "log", "secrets", "platforms", "allocator", "command_line", "config"},
    {"models", "data", "optim", "transforms", "loss"},
    {"distributed"},
    {"checkpoint", "observe", "resilience"},
    {"state"},
    {"resolve"},
    {"feed", "resume"},
    {"evaluate"},
    {"trainer"},
    {"trainers"},
    {"train", "convert"},
    {"launch"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Value types that rooms of one floor may take from each other.
VALUES = {("loss", "torchtitan.data.batch")}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, at any depth, those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def is_command(path: Path) -> bool:
    """Commands stand above all rooms, whatever folder they lie in."""
    return path.name == "__main__.py" or path.parent.name == "commands"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    if path.parent == PACKAGE and path.name == "__init__.py":
        assert not list(imports(path))
        return
    own = len(FLOORS) if is_command(path) else FLOOR[room(path)]
    for module in imports(path):
        if not module.startswith("torchtitan."):
            continue
        other = module.split(".")[1]
        if other == room(path) or (room(path), module) in VALUES or FLOOR[other] < own:
            continue
        # Errors, names and notes are used by everything, the config room included.
        assert own == 0 and other in FLOORS[0], f"{path} imports {module}"


def test_no_cycles_between_modules() -> None:
    graph = {}
    for path in FILES:
        name = ".".join(("torchtitan", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = {m for m in imports(path) if m.startswith("torchtitan.") and m != name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name in done or name not in graph:
            return
        for other in graph[name]:
            visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_config_imports_no_torch() -> None:
    for path in FILES:
        if room(path) in FLOORS[0] and not is_command(path):
            assert not [m for m in imports(path) if m.split(".")[0] in {"torch", "torchdata", "numpy"}], path


def test_torch_distributed_stays_in_its_rooms() -> None:
    for path in FILES:
        if room(path) in {"distributed", "checkpoint", "resilience", "launch"}:
            continue
        assert not [m for m in imports(path) if m.startswith("torch.distributed")], path


def test_models_know_nothing_of_ranks() -> None:
    words = re.compile(r"\b(mesh|rank|ranks|dtensor|shard|sharded|distributed)\b", re.IGNORECASE)
    for path in FILES:
        if room(path) == "models":
            found = {match.group() for match in words.finditer(path.read_text())}
            assert not found, f"{path}: {found}"


def test_the_whole_config_is_seen_by_few() -> None:
    for path in FILES:
        if room(path) in {"config", "resolve", "trainer", "train", "launch"} or is_command(path):
            continue
        assert "JobConfig" not in path.read_text(), path


PRIVATE = {
    "_StorageInfo": "checkpoint/dcp/writer.py",
    # attribute or name → the one file that may use it, because there is no public way
    "_auto_filter_for_recipe": "transforms/float8.py",
    "_dynamo": "distributed/compile.py",
    "_functorch": "distributed/compile.py",
    "_set_pg_timeout": "distributed/world.py",
    "__create_chunk_list__": "distributed/whole.py",
    "_Action": "distributed/schedules.py",
    "_ComputationType": "distributed/schedules.py",
    "_PipelineScheduleRuntime": "distributed/schedules.py",
}


def test_private_torch_names_have_one_door() -> None:
    for path in FILES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
                names = [node.attr]
            else:
                continue
            private = {n for n in names if n.startswith("_") and n not in {"__name__", "__qualname__", "__init__"}}
            for name in private & set(PRIVATE) | {n for n in private if isinstance(node, ast.ImportFrom)}:
                if (node.module if isinstance(node, ast.ImportFrom) else "torch").startswith("torchtitan"):
                    continue
                assert PRIVATE.get(name) == str(path.relative_to(PACKAGE)), f"{path} uses {name}"


def test_private_torch_names_still_exist() -> None:
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.tensor import DTensor

    assert callable(distributed_c10d._set_pg_timeout)
    assert vars(filesystem._StorageInfo("file", 1, 2)).items() >= {"relative_path": "file", "offset": 1}.items()
    assert callable(DTensor.__create_chunk_list__)
    assert "_auto_filter_for_recipe" in importlib.import_module("torchao.float8").__all__


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_say_what_they_are(path: Path) -> None:
    source = path.read_text()
    if path.name == "__init__.py" and not source.strip():
        return
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring and len(docstring.splitlines()) >= (1 if path.name == "__init__.py" else 3), (
        f"{path} does not begin with what it is and what does not belong in it"
    )


def test_no_rooms_without_a_subject() -> None:
    forbidden = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    assert not {p.stem for p in FILES} & forbidden
    names = re.compile(r"\bdef (maybe_|handle_|process_)\w+")
    for path in FILES:
        assert not names.search(path.read_text()), path


def test_public_names_exist() -> None:
    for module, name in [
        ("torchtitan", "__version__"),
        ("torchtitan.config", "load_config"),
        ("torchtitan.config", "JobConfig"),
        ("torchtitan.registry", "Registry"),
        ("torchtitan.models.spec", "MODELS"),
        ("torchtitan.data.datasets", "DATASETS"),
        ("torchtitan.data.tokenizer", "TOKENIZERS"),
        ("torchtitan.optim.optimizers", "OPTIMIZERS"),
        ("torchtitan.optim.schedules", "SCHEDULES"),
        ("torchtitan.loss.losses", "LOSSES"),
        ("torchtitan.trainers", "TRAINERS"),
        ("torchtitan.transforms", "CONVERTERS"),
        ("torchtitan.observe.sinks", "SINKS"),
        ("torchtitan.trainer", "Trainer"),
    ]:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_what_is_checked_before_a_run_imports_nothing_that_spreads_or_compiles_a_model(tmp_path: Path) -> None:
    """And no package that the run does not use: the launcher's start is waited for each time."""
    heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo")
    unused = ("sympy", "datasets", "pyarrow", "wandb", "tensorboard", "transformers", "torchao", "pandas", "boto3")
    code = f"""if True:
        import sys, torch.distributed.run
        from torchtitan.config import load_config
        from torchtitan.resolve.job import resolve_job
        file = "--job.config_file=debug_model"
        muon = '--optimizer.groups=[{{pattern = "layers.*.w*.weight", name = "Muon"}}]'
        resolve_job(load_config([file, "--job.dump_folder={tmp_path / "run"}", muon]), 1)
        print([name for name in {heavy + unused} if name in sys.modules])
    """
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_files_that_are_started_first_are_there() -> None:
    assert not [name for name in LONG if not (ROOT / "tests" / name).is_file()]


def test_home_folders_are_written_out_in_one_place() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in FILES if "expanduser(" in path.read_text()}
    assert found == {"config/paths.py"}, "pathlib's raises RuntimeError for a user who is not there"
