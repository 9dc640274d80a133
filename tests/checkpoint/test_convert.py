"""The command that converts: there and back, what transformers makes of it, what is refused, and what is left."""

import dataclasses
import errno
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from upath import UPath

from tests.checkpoint.weights import FAMILIES, random_weights, read_folder, same, tiny, write_folder
from tests.conftest import CHECKOUT
from torchtitan import convert
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.huggingface.export import export_plan, write_files, write_rest
from torchtitan.checkpoint.huggingface.load import Source, load_weights
from torchtitan.checkpoint.manifest import Manifest, damage
from torchtitan.checkpoint.storage import find_step
from torchtitan.config import load_config
from torchtitan.convert import main
from torchtitan.log import logger
from torchtitan.models.huggingface import from_config, to_config
from torchtitan.models.spec import MODELS
from torchtitan.resolve.model import resolve_args


def convert_there(folder: Path, *options: str) -> Path:
    """A checkpoint made of a tiny model's folder beside it."""
    assert main(["from-hf", str(folder), str(folder.parent / "step-0"), *options]) == 0
    return folder.parent / "step-0"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of the tiny llama3."""
    spec, args = tiny("llama3")
    write_folder(tmp_path / "hf", spec, args, random_weights(spec, args))
    return convert_there(tmp_path / "hf")


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tied: bool, tmp_path: Path) -> None:
    spec, args = tiny(family, tied=tied)
    state = random_weights(spec, args)
    tensors = write_folder(tmp_path / "hf", spec, args, state, shards=2)
    step = convert_there(tmp_path / "hf")
    manifest = Manifest.read(UPath(step))
    assert manifest.step == 0 and damage(UPath(step), manifest, manifest.files) is None
    assert left(step) == {*manifest.files, "manifest.json"} and "config.toml" in manifest.files
    config = load_config([f"--job.config_file={step / 'config.toml'}"])
    assert config.model.name == family and resolve_args(spec, config.model.flavor, config.model.args) == args
    reader = Reader(UPath(step))
    assert same({name: reader.tensor(name) for name in reader.tensors}, state)

    assert main(["to-hf", str(step), str(tmp_path / "back"), "--shard-size-gb", "2e-5"]) == 0
    assert same(read_folder(tmp_path / "back"), tensors)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
    ]
    assert len(files) > 3 and all(path.stat().st_size < 24_000 for path in files)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, framework="pt") as opened:
            assert name in opened.keys() and opened.metadata() == {"format": "pt"}  # noqa: SIM118
    manifest = Manifest.read(UPath(tmp_path / "back"))
    assert left(tmp_path / "back") == {*manifest.files, "manifest.json"}

    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert peer.dtype is torch.float32
    model = spec.cls(args)
    load_weights(tmp_path / "back", spec, args, dict(model.named_parameters()))
    tokens = torch.arange(60).view(2, 30) * 7 % 101
    with torch.no_grad():
        logits = model(tokens, torch.arange(30).expand(2, -1))
        torch.testing.assert_close(logits, peer.eval()(tokens).logits, atol=1e-5, rtol=0.0)
    assert logits.std() > 0.1


@pytest.mark.parametrize("peer", ["hf_llama", "hf_qwen3"])
def test_files_of_transformers(peer: str, shared: Path, tmp_path: Path) -> None:
    folder = shared / "compat" / peer
    assert main(["from-hf", str(folder), str(tmp_path / "step")]) == 0
    assert main(["to-hf", str(tmp_path / "step"), str(tmp_path / "back"), "--tokenizer", str(folder)]) == 0
    assert same(load_file(tmp_path / "back" / "model.safetensors"), load_file(folder / "model.safetensors"))
    copied = "generation_config.json"
    assert (tmp_path / "back" / copied).read_bytes() == (folder / copied).read_bytes()
    assert left(tmp_path / "back") == {"model.safetensors", "config.json", copied, "manifest.json"}
    spec = MODELS.get(peer.removeprefix("hf_") + ("3" if peer == "hf_llama" else ""))
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back")]
    assert from_config(spec, configs[0]) == from_config(spec, configs[1])


@pytest.mark.parametrize("case", ["ws1", "tp2"])
def test_a_step_that_titan_wrote(case: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = shared / "compat" / "titan022_dcp" / case / "step-5"
    assert main(["to-hf", str(step), str(tmp_path / "hf")]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"{step} does not say what model it holds; add --job.conf")
    )
    args = ["dim=32", "n_layers=2", "n_heads=4", "n_kv_heads=2", "vocab_size=2048", "multiple_of=16"]
    say = ["--model.name=llama3", *(f"--model.args.{arg}" for arg in args)]
    assert main(["to-hf", str(step), str(tmp_path / "short"), *say, "--model.args.n_layers=1"]) == 2
    assert "holds layers.1.attention.wk.weight, which such a model has not" in capsys.readouterr().err
    assert main(["to-hf", str(step), str(tmp_path / "hf"), *say]) == 0
    assert Manifest.read(UPath(tmp_path / "hf")).step == 5
    reader, tensors = Reader(UPath(step)), read_folder(tmp_path / "hf")
    assert torch.equal(tensors["lm_head.weight"], reader.tensor("output.weight"))
    assert len(tensors) == 3 + 2 * 9
    assert left(tmp_path) == {"hf"}


def test_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec, args = tiny("llama3")
    state = random_weights(spec, args)
    state["layers.0.attention.wo.weight"][0, 0] = state["layers.1.attention.wo.weight"][0, 0] = 1e6
    tensors = write_folder(tmp_path / "hf", spec, args, state)
    step = convert_there(tmp_path / "hf")
    for word in ("bfloat16", "float16", "float32"):
        caplog.clear()
        logger.propagate = True
        kind = getattr(torch, word)
        plan = export_plan(spec, args, reader := Reader(UPath(step)), dtype=kind)
        (tmp_path / word).mkdir()
        files = write_files(plan, reader, UPath(tmp_path / word), plan.files) | write_rest(plan, UPath(tmp_path / word))
        assert set(files) == {"model.safetensors", "config.json"}
        assert same(read_folder(tmp_path / word), {name: tensor.to(kind) for name, tensor in tensors.items()})
        config = json.loads((tmp_path / word / "config.json").read_text())
        assert config["torch_dtype"] == config["dtype"] == word
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == (word == "float16")
        assert all(line.startswith("model.layers.0.self_attn.o_proj.weight has values beyond") for line in warnings)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16", dtype="auto").dtype is torch.bfloat16
    shutil.rmtree(step)
    reader = Reader(UPath(convert_there(tmp_path / "bfloat16")))
    assert {entry.properties.dtype for entry in reader.tensors.values()} == {torch.bfloat16}
    shutil.rmtree(step)
    reader = Reader(UPath(convert_there(tmp_path / "bfloat16", "--dtype=float32")))
    assert same(
        {name: reader.tensor(name) for name in reader.tensors},
        {name: tensor.bfloat16().float() for name, tensor in state.items()},
    )


def test_ranks_write_their_share(step: Path, tmp_path: Path) -> None:
    spec, args = tiny("llama3")
    tensors = read_folder(tmp_path / "hf")
    (tmp_path / "back").mkdir()
    for rank in range(3):
        plan = export_plan(spec, args, reader := Reader(UPath(step)), shard_bytes=20_000)
        own = sorted(plan.files)[rank::3]
        assert set(write_files(plan, reader, UPath(tmp_path / "back"), own)) == set(own)
    assert same(read_folder(tmp_path / "back"), tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_size_is_called_by_its_name(family: str) -> None:
    spec = MODELS.get(family)
    for flavor, args in spec.flavors.items():
        assert convert._as_flavor(spec, from_config(spec, to_config(spec, args))) == (flavor, args)


def test_what_a_flavor_has_and_the_folder_has_not_is_unset(tmp_path: Path) -> None:
    spec = MODELS.get("qwen3")  # whose debug model has a width of its heads
    args = spec.args_cls(dim=64, n_layers=1, n_heads=4, n_kv_heads=None, head_dim=None, vocab_size=101, ffn_dim=32)
    usual = spec.flavors["debugmodel"]
    text = convert._model_toml("qwen3", "debugmodel", dataclasses.asdict(args), dataclasses.asdict(usual))
    (tmp_path / "config.toml").write_text(text)
    model = load_config([f"--job.config_file={tmp_path / 'config.toml'}"]).model
    assert model.args["head_dim"] == "none" and "ffn_dim_multiplier" not in model.args
    assert resolve_args(spec, "debugmodel", model.args) == args


def test_the_newest_step_of_a_run(step: Path, tmp_path: Path) -> None:
    steps = tmp_path / "run" / "checkpoint"
    for number in (5, 10, 20):
        shutil.copytree(step, steps / f"step-{number}")
    (steps / "step-20" / "manifest.json").unlink()  # killed
    shutil.rmtree(steps / "step-5")
    assert find_step(str(tmp_path / "run")).name == "step-10"
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    assert same(read_folder(tmp_path / "back"), read_folder(tmp_path / "hf"))


def test_what_is_refused(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken.partial").mkdir()
    (tmp_path / "empty.replaced").mkdir()
    out, before = str(tmp_path / "out"), left(tmp_path)
    hf = str(tmp_path / "hf")
    for words, told in (
        (["to-hf", str(step), str(tmp_path / "full")], "is there already and is not an empty folder"),
        (["from-hf", hf, str(tmp_path / "full")], "is there already and is not an empty folder"),
        (["from-hf", hf, str(tmp_path / "full" / "x")], "is there already"),
        (["from-hf", hf, str(tmp_path / "taken")], "taken.partial at first, and that is there already"),
        (["from-hf", str(tmp_path / "empty"), out], "config.json is missing"),
        (["from-hf", "https://huggingface.co/x", out], "is a URL"),
        (["from-hf", hf, out, "--model.args.dim=3"], "--model.args.dim: is not taken here"),
        (["to-hf", hf, out], f"{hf}: no checkpoint there"),
        (["to-hf", str(step), out, "--model.args.dim", "3"], "--model.args.dim: is not taken here"),
        (["to-hf", str(step), out, "--tokenizer", str(tmp_path / "empty")], "is no folder with tokenizer.json"),
        (["to-hf", str(step), out, "--job.imports", "nowhere"], "cannot import nowhere"),
    ):
        assert main(words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
    for words in (["to-hf", str(step), out, "--shard-size-gb", "0"], ["from-gguf", hf, out], ["to-hf", str(step)]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert left(tmp_path) == before and (tmp_path / "full" / "x").read_text() == "mine"
    assert main(["to-hf", str(step), str(tmp_path / "empty")]) == 0
    assert left(tmp_path) == before


@pytest.mark.parametrize("name", ["__0_0.distcp", "config.toml", ".metadata"])
def test_a_damaged_step_is_refused(name: str, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((step / name).read_bytes())
    content[len(content) // 2] ^= 1
    (step / name).write_bytes(content)
    capsys.readouterr()
    assert main(["to-hf", str(step), str(tmp_path / "back")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(step / name) in line
    assert left(tmp_path) == {"hf", "step-0"}


def interrupted_in_torch() -> BaseException:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (interrupted_in_torch(), "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), "failed"),
    ],
)
def test_what_ends_in_the_middle_leaves_nothing(
    error: BaseException,
    told: str,
    step: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "out").mkdir()
    calls = []
    fill, read = Source.fill, Reader.tensor

    def failing_fill(source: Source, name: str, tensor: Tensor) -> None:
        calls.append(name)
        if len(calls) == 5:
            raise error
        fill(source, name, tensor)

    def failing_read(reader: Reader, name: str) -> Tensor:
        calls.append(name)
        if len(calls) == 5:
            raise error
        return read(reader, name)

    monkeypatch.setattr(Source, "fill", failing_fill)
    monkeypatch.setattr(Reader, "tensor", failing_read)
    for words in (["from-hf", str(tmp_path / "hf")], ["to-hf", str(step)]):
        calls.clear()
        assert main([*words, str(tmp_path / "out")]) == 1
        assert len(calls) == 5 and capsys.readouterr().err.splitlines()[-1].startswith(f"{told}, nothing is left at")
        assert left(tmp_path) == {"hf", "step-0", "out"} and left(tmp_path / "out") == set()


def test_into_a_bucket_and_out_of_it(tmp_path: Path, step: Path) -> None:
    url = f"memory://{tmp_path.name}"
    assert main(["from-hf", str(tmp_path / "hf"), f"{url}/run/step-0"]) == 0
    assert main(["to-hf", f"{url}/run", f"{url}/hf"]) == 0
    assert sorted(path.name for path in UPath(f"{url}/hf").iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "model.safetensors").write_bytes((UPath(f"{url}/hf") / "model.safetensors").read_bytes())
    assert same(read_folder(tmp_path / "back"), read_folder(tmp_path / "hf"))


# Not getrusage, which counts what the process was before it became this one.
MEASURED = """
import re, sys
from torchtitan.convert import main

peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
hf, step, back = sys.argv[1:]
main(["from-hf", hf + "-tiny", step + "-tiny"])  # what is loaded once
main(["to-hf", step + "-tiny", back + "-tiny"])
before = peak()
assert main(["from-hf", hf, step]) == 0
there = peak()
assert main(["to-hf", step, back, "--shard-size-gb", "0.02"]) == 0
print(there - before, peak() - before)
"""


def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    spec, args = tiny("llama3")
    write_folder(tmp_path / "hf-tiny", spec, args, random_weights(spec, args))
    spec, args = tiny("llama3", dim=1024, n_layers=5, head_dim=256, ffn_dim=1024, vocab_size=2048)
    tensors = write_folder(tmp_path / "hf", spec, args, random_weights(spec, args), shards=2)
    total, largest = sum(t.nbytes for t in tensors.values()) / 2**20, max(t.nbytes for t in tensors.values()) / 2**20
    assert total > 120 and largest < 9
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            MEASURED,
            *(str(tmp_path / n) for n in ("hf", "step", "back")),
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    there, both = (int(kib) / 1024 for kib in ended.stdout.split())
    assert there < 60 and both < 60, f"{there:.0f} and {both:.0f} MiB more, the model has {total:.0f}"
    assert "\r" not in ended.stderr and re.search(
        r"back: .* as llama3, 1\d\d\.\d MiB of float32, files: \d, \d+ s", ended.stderr
    )
    assert same(read_folder(tmp_path / "back"), tensors)
