"""``python -m torchtitan.checkpoint``: what it shows of steps that are whole, half, rotten, foreign or different."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from upath import UPath

from torchtitan.checkpoint.__main__ import main
from torchtitan.checkpoint.dcp.writer import write_lazily
from torchtitan.checkpoint.manifest import FORMAT, MANIFEST, Manifest
from torchtitan.checkpoint.places import FileRecord
from torchtitan.checkpoint.storage import step_folders

STATE = {"train_state": {"step": 5, "tokens_seen": 640}, "dataloader": {"next_row": 20}}


def tensors() -> dict[str, torch.Tensor]:
    weights = {f"layers.{i}.wq.weight": torch.arange(6.0).reshape(2, 3) + i for i in (0, 2, 10)}
    states = {f"optimizer.state.{name}.exp_avg": w / 4 for name, w in weights.items()}
    return {**weights, "norm.weight": torch.ones(3), **states}


def save(root: Path | UPath, step: int, *, export: bool = False, **changes: Any) -> UPath:
    """A step as the saver leaves it, with tensors and numbers changed by their names (``_`` for a dot)."""
    root = UPath(root)
    held = tensors() | {n: changes[n.replace(".", "_")] for n in tensors() if n.replace(".", "_") in changes}
    dtype = changes.get("dtype", torch.float32)
    folders = step_folders(root)
    folder = folders.export(step) if export else folders.path(step)
    folders.prepare(folder)
    partial = folders.partial(folder)
    files = write_lazily(partial, {n: t.shape for n, t in held.items()}, dtype, lambda n: held[n].to(dtype))
    (partial / "config.toml").write_text("[training]\nsteps = 5\n")
    files |= {"config.toml": FileRecord.of(partial / "config.toml")}
    Manifest(step, changes.get("state", STATE), files).write(partial)
    folders.commit(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two steps."""
    for step in (5, 10):
        save(tmp_path / "run" / "checkpoint", step)
    return tmp_path / "run"


Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def shown(*argv: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in argv])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return shown


def as_json(show: Show, *argv: object) -> tuple[int, Any]:
    code, out, _ = show(*argv, "--json")
    return code, json.loads(out)


def states(show: Show, root: Path) -> dict[str, str]:
    return {Path(step["folder"]).name: step["state"] for step in as_json(show, "list", root)[1]}


# list


def test_steps_are_listed(show: Show, run: Path) -> None:
    for path in (run, run / "checkpoint"):
        code, out, _ = show("list", path)
        lines = [line.split() for line in out.splitlines()]
        assert code == 0 and len(lines) == 4 and out.splitlines()[-1].startswith("* is where a start goes on")
        assert lines[1][0] == "5" and lines[2][:2] == ["*", "10"] and lines[2][-1] == "complete"
        assert "7" in lines[2] and "21" in lines[2] and "float32" in lines[2]
    code, steps = as_json(show, "list", run)
    assert [(s["step"], s["tensors"], s["parameters"], s["files"]) for s in steps] == [(5, 7, 21, 3), (10, 7, 21, 3)]
    assert steps[0]["bytes"] == sum(p.stat().st_size for p in (run / "checkpoint/step-5").iterdir()) - (
        (run / "checkpoint/step-5" / MANIFEST).stat().st_size
    )


def test_a_checkpoint_folder_of_another_name_is_found(show: Show, run: Path) -> None:
    (run / "checkpoint").rename(run / "kept")
    assert show("list", run)[0] == 2
    (run / "config.toml").write_text('[checkpoint]\nfolder = "kept"\n')
    assert set(states(show, run)) == {"step-5", "step-10"}


def test_why_a_step_does_not_count(show: Show, run: Path, tmp_path: Path) -> None:
    root = run / "checkpoint"
    for step in (15, 20, 25, 30, 35):
        save(root, step)
    (root / "step-15").rename(root / "step-15.superseded")
    (root / "step-20").rename(root / "step-20.partial")
    (root / "step-25" / MANIFEST).rename(root / "step-25" / "was")
    raw = json.loads((root / "step-30" / MANIFEST).read_text())
    (root / "step-30" / MANIFEST).write_text(json.dumps({**raw, "format": FORMAT + 1}))
    (root / "step-35" / MANIFEST).write_text("{")
    save(root, 40, export=True)
    (root / "step-45").mkdir()
    (root / "step-50").mkdir()
    (root / "step-50" / "model.safetensors").write_bytes(b"")
    (root / "step-55.partial").mkdir()
    (root / "step-55.partial" / "__0_0.distcp").write_bytes(b"half")
    os.utime(root / "step-55.partial" / "__0_0.distcp", (1.0e9, 1.0e9))
    (root / "step-60").mkdir()
    (root / "step-60" / "__0_0.distcp").write_bytes(b"half")
    assert states(show, root) == {
        "step-5": "complete",
        "step-10": "complete",
        "step-15.superseded": "superseded",
        "step-20.partial": "being written",
        "step-25": "foreign",
        "step-30": "newer",
        "step-35": "damaged",
        "step-40-export": "export",
        "step-45": "unknown",
        "step-50": "hugging face",
        "step-55.partial": "interrupted",
        "step-60": "interrupted",
    }
    code, out, _ = show("list", root)
    assert code == 0
    assert next(line for line in out.splitlines() if line.startswith("*")).split()[1] == "10"
    for words in (
        "weights in Hugging Face form",
        "update torchtitan",
        "set aside",
        "weights alone",
        "not a checkpoint",
    ):
        assert words in out


def test_what_one_step_holds(show: Show, run: Path) -> None:
    code, out, _ = show("list", run / "checkpoint" / "step-10")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "7 tensors, of which 4 are weights: 21 parameters in float32" in lines
    assert "layers.2.wq.weight [2, 3] float32 + exp_avg" in lines and "norm.weight [3] float32" in lines
    order = [line.split()[0] for line in lines if line.endswith("+ exp_avg")]
    assert order == [f"layers.{i}.wq.weight" for i in (0, 2, 10)]
    assert "dataloader.next_row 20" in lines and "steps = 5" not in lines
    _, out, _ = show("list", run / "checkpoint" / "step-10", "--all", "--config")
    assert "optimizer.state.layers.10.wq.weight.exp_avg  [2, 3]  float32" in out and "steps = 5" in out
    _, step = as_json(show, "list", run / "checkpoint" / "step-10")
    assert step["keys"]["norm.weight"] == {"shape": [3], "dtype": "float32"}
    assert step["numbers"]["train_state.tokens_seen"] == 640


def foreign(folder: Path, **values: Any) -> Path:
    state = {**tensors(), "train_state": {"step": 5, "ntokens_seen": 64}, "dataloader": {"world_size": 2}, **values}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_step_of_another_program(show: Show, tmp_path: Path) -> None:
    folder = foreign(tmp_path / "checkpoint" / "step-5")
    code, out, _ = show("list", folder)
    assert code == 0 and "a run of TorchTitan" in out and "3 values: dataloader.world_size" in out
    assert "train_state.tokens_seen  128" in out
    assert "a run of TorchTitan" in show("list", tmp_path)[1]
    code, out, _ = show("verify", tmp_path)
    assert code == 0 and "there are no hashes" in out
    save(tmp_path / "ours", 5, state={"train_state": {"step": 5, "tokens_seen": 128}})
    assert show("compare", folder, tmp_path / "ours")[0] == 0


# verify


def test_sound_steps(show: Show, run: Path) -> None:
    (run / "checkpoint" / "step-10" / "notes.txt").write_text("")
    save(run / "checkpoint", 15).rename(run / "checkpoint" / "step-15.partial")
    code, out, err = show("verify", run)
    assert (code, err) == (0, "") and out.count("as written") == 2
    assert "note: notes.txt is not in the manifest" in out and "step-15.partial: not looked at" in out


def test_every_damaged_file_is_named(show: Show, run: Path) -> None:
    folder = run / "checkpoint" / "step-10"
    for name in ("__0_0.distcp", ".metadata"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    (folder / "config.toml").unlink()
    code, out, _ = show("verify", run)
    assert code == 1 and "step-5: as written" in out and "step-10: DAMAGED" in out
    for name in ("__0_0.distcp was changed", ".metadata was changed", "config.toml cannot be read"):
        assert name in out
    assert show("verify", run, "--step", 5)[0] == 0
    assert show("verify", run, "--step=10")[0] == show("verify", folder)[0] == 1
    code, verdicts = as_json(show, "verify", run)
    assert code == 1 and [len(verdict["damage"]) for verdict in verdicts] == [0, 3]
    (folder / MANIFEST).write_text("{")
    code, out, _ = show("verify", run)
    assert code == 1 and MANIFEST in out


def test_an_index_that_is_hashed_and_still_wrong(show: Show, run: Path) -> None:
    folder = UPath(run / "checkpoint" / "step-10")
    manifest = Manifest.read(folder)
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-10])
    cut = {"__0_0.distcp": FileRecord.of(folder / "__0_0.distcp")}
    Manifest(10, manifest.state, {**manifest.files, **cut}).write(folder)
    code, out, _ = show("verify", folder)
    assert code == 1 and "is said to lie beyond them" in out
    (folder / ".metadata").write_bytes(b"\x80\x04N.")
    Manifest(10, manifest.state, {".metadata": FileRecord.of(folder / ".metadata"), **cut}).write(folder)
    code, out, _ = show("verify", folder)
    assert code == 1 and "is not the index of a checkpoint" in out
    assert "its index cannot be read" in show("list", run)[1]
    assert show("list", folder)[0] == 1


def test_a_foreign_step_is_held_against_its_index(show: Show, tmp_path: Path) -> None:
    folder = foreign(tmp_path / "step-5")
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:2000])
    code, out, _ = show("verify", folder)
    assert code == 1 and "__0_0.distcp has 2000 bytes" in out
    (folder / "__0_0.distcp").unlink()
    code, out, _ = show("verify", folder)
    assert code == 1 and "__0_0.distcp cannot be read" in out


# compare


def compared(show: Show, root: Path, changes: Mapping[str, Any], *options: object) -> tuple[int, Any]:
    save(root / "one", 5)
    save(root / "two", 5, **changes)
    return as_json(show, "compare", root / "one", root / "two", *options)


def test_equal_steps(show: Show, run: Path) -> None:
    code, out, err = show("compare", run / "checkpoint" / "step-5", run)
    assert (code, err) == (0, "")
    assert "7 tensors in both: 7 equal, 7 of them to the bit" in out and out.endswith("equal\n")


def test_values_that_differ(show: Show, tmp_path: Path) -> None:
    changed = tensors()["layers.2.wq.weight"]
    changed[0, 1] += 0.5
    changed[1, 2] -= 0.25
    code, found = compared(show, tmp_path, {"layers_2_wq_weight": changed})
    told = found["tensors"]["layers.2.wq.weight"]
    assert code == 1 and not found["equal"]
    assert (told["differing"], told["elements"], told["largest"], told["magnitude"]) == (2, 6, 0.5, 7.0)
    assert told["relative"] == pytest.approx(0.5 / 7)
    assert [name for name, d in found["tensors"].items() if d["differs"]] == ["layers.2.wq.weight"]
    two = ("compare", tmp_path / "one", tmp_path / "two")
    assert [show(*two, f"--atol={x}")[0] for x in (0.5, 0.49)] == [0, 1]
    assert [show(*two, f"--rtol={x}")[0] for x in (0.15, 0.12)] == [0, 1]  # 0.5 of 3.5, 0.25 of 6.75
    _, out, _ = show(*two)
    assert "layers.2.wq.weight 0.5 0.0714 2 of 6" in [" ".join(line.split()) for line in out.splitlines()]


def test_what_is_no_number(show: Show, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    save(tmp_path / "one", 5, norm_weight=torch.tensor([nan, inf, 0.0]))
    save(tmp_path / "two", 5, norm_weight=torch.tensor([nan, inf, -0.0]))
    code, found = as_json(show, "compare", tmp_path / "one", tmp_path / "two")
    told = found["tensors"]["norm.weight"]
    assert code == 0 and (told["nans"], told["same_bits"], told["differing"]) == (1, False, 0)
    assert "1 elements are NaN in both" in show("compare", tmp_path / "one", tmp_path / "two")[1]
    for other in ([1.0, inf, 0.0], [nan, 1.0, 0.0], [nan, -inf, 0.0], [nan, inf, nan]):
        save(tmp_path / "two", 5, norm_weight=torch.tensor(other))
        code, found = as_json(show, "compare", tmp_path / "one", tmp_path / "two", "--rtol=1", "--atol=1e30")
        assert code == 1 and found["tensors"]["norm.weight"]["outside"] == 1, other


def test_other_shapes_dtypes_and_names(show: Show, tmp_path: Path) -> None:
    code, found = compared(show, tmp_path, {"norm_weight": torch.ones(4)})
    assert code == 1 and found["tensors"]["norm.weight"]["shapes"] == [[3], [4]]
    assert "[3] in A, [4] in B" in show("compare", tmp_path / "one", tmp_path / "two")[1]
    code, found = compared(show, tmp_path, {"dtype": torch.bfloat16})
    assert code == 1 and found["tensors"]["norm.weight"]["dtypes"] == ["float32", "bfloat16"]
    assert show("compare", tmp_path / "one", tmp_path / "two", "--rtol=1e-6")[0] == 0  # all are small integers
    dcp.save({"norm.weight": torch.ones(3), "bias": torch.ones(1)}, checkpoint_id=tmp_path / "step-9", no_dist=True)
    code, found = as_json(show, "compare", tmp_path / "one", tmp_path / "step-9")
    assert code == 1 and found["only_in_b"] == ["bias"] and len(found["only_in_a"]) == 6


def test_tensors_of_all_kinds(show: Show, tmp_path: Path) -> None:
    odd = {
        "empty": (torch.ones(0, 2), torch.ones(0, 2, dtype=torch.float64), 0, 0.0),
        "scalar": (torch.tensor(3.0), torch.tensor(5.0), 1, 2.0),
        "switch": (torch.tensor([True, True]), torch.tensor([True, False]), 1, 1.0),
        "large": (torch.tensor([2**60, 1]), torch.tensor([2**60 + 1, 1]), 1, 0.0),  # one and the same double
        "half": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), 3, 1.0),
        "quarter": (torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(3).to(torch.float8_e4m3fn), 3, 1.0),
        "complex": (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 1, 2.0),
    }
    for i in (0, 1):
        folder = tmp_path / f"step-{i}"
        dcp.save({name: pair[i] for name, pair in odd.items()}, checkpoint_id=folder, no_dist=True)
    code, found = as_json(show, "compare", tmp_path / "step-0", tmp_path / "step-1")
    assert code == 1 and all(told["differs"] for told in found["tensors"].values())
    told = {name: (t["differing"], t["largest"]) for name, t in found["tensors"].items()}
    assert told == {name: (differing, largest) for name, (_, _, differing, largest) in odd.items()}


def test_numbers_and_states_count_unless_the_model_alone_is_asked_for(show: Show, tmp_path: Path) -> None:
    changes = {
        "optimizer_state_layers_0_wq_weight_exp_avg": torch.zeros(2, 3),
        "state": {**STATE, "dataloader": {"next_row": 24}},
    }
    code, found = compared(show, tmp_path, changes)
    assert code == 1 and found["numbers"] == {"dataloader.next_row": [20, 24]}
    assert "dataloader.next_row: 20 in A, 24 in B" in show("compare", tmp_path / "one", tmp_path / "two")[1]
    code, found = as_json(show, "compare", tmp_path / "one", tmp_path / "two", "--model-only")
    assert code == 0 and len(found["tensors"]) == 4


def test_numbers_that_are_none_are_null_for_machines(show: Show, tmp_path: Path) -> None:
    state = {"train_state": {"step": 5, "loss": float("nan"), "limits": [1.5, float("-inf")]}}
    save(tmp_path / "one", 5, state=state)
    code, out, _ = show("list", tmp_path / "one" / "step-5", "--json")
    assert code == 0 and json.loads(out, parse_constant=pytest.fail)["numbers"]["train_state.loss"] is None
    assert "train_state.loss    nan" in show("list", tmp_path / "one" / "step-5")[1]


# in a bucket, and when the command is wrong


def test_where_nothing_is_a_file_system(show: Show, tmp_path: Path) -> None:
    root = UPath(f"memory://{tmp_path.name}/run")
    save(root / "checkpoint", 5)
    half = save(root / "checkpoint", 10)
    (half / MANIFEST).unlink()
    (half / "being-written").write_text("")
    code, out, _ = show("list", root)
    assert code == 0 and out.splitlines()[1].startswith("*") and "not complete" in out.splitlines()[2]
    assert show("verify", root)[0] == show("compare", root, root / "checkpoint" / "step-5")[0] == 0
    content = bytearray((root / "checkpoint" / "step-5" / "__0_0.distcp").read_bytes())
    content[5] ^= 1
    (root / "checkpoint" / "step-5" / "__0_0.distcp").write_bytes(bytes(content))
    code, out, _ = show("verify", root)
    assert code == 1 and "__0_0.distcp was changed" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list"], "PATH"),
        (["look", "x"], "invalid choice"),
        (["list", "nowhere"], "nowhere: there is no such folder"),
        (["list", "empty"], "empty: no checkpoint there"),
        (["list", "file"], "file: is a file"),
        (["verify", "empty/step-1"], "nothing to verify: not a checkpoint"),
        (["verify", "run", "--step", "7"], "there is no step 7"),
        (["verify", "run", "--step", "x"], "--step"),
        (["verify", "newer"], "update torchtitan"),
        (["compare", "run"], "B"),
        (["compare", "run", "nowhere"], "nowhere: there is no such folder"),
        (["compare", "run", "hf"], "weights in Hugging Face form"),
        (["compare", "run", "run", "--rtol=-1"], "no tolerance"),
        (["list", "run", "--all"], "want one, such as run/checkpoint/step-10"),
        (["list", "nosuchscheme://x"], "nosuchscheme"),
        (["list", "s3://user:password@bucket/x"], "credentials"),
    ],
)
def test_a_wrong_command_is_told_in_one_line(
    show: Show, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("empty", "hf"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    folder = save("newer/checkpoint", 5)
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace(f'"format": {FORMAT}', '"format": 99'))
    if "empty/step-1" in argv:
        (tmp_path / "empty" / "step-1").mkdir()
    code, out, err = show(*argv)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1 and "password" not in err


def test_help_is_quick_to_say() -> None:
    for words in (["--help"], ["list", "--help"], ["verify", "--help"], ["compare", "--help"]):
        code = f"import sys; sys.argv[1:] = {words}; import torchtitan.checkpoint.__main__ as m\n"
        code += "try: m.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ended.stdout.endswith("False\n") and "Exit codes: 0" in ended.stdout
