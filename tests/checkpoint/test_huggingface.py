"""Hugging Face folders as they are read: whole, in parts by several ranks, and such as must be refused."""

import itertools
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.checkpoint.weights import FAMILIES, random_weights, same, tiny, write_folder
from tests.launch import run_ranks
from torchtitan.checkpoint.huggingface import load as huggingface
from torchtitan.checkpoint.huggingface.files import WeightFolder
from torchtitan.checkpoint.huggingface.load import load_weights
from torchtitan.config.schema import Parallelism
from torchtitan.distributed.fsdp import Precision
from torchtitan.distributed.parallelize import parallelize
from torchtitan.distributed.spread import plan_spread
from torchtitan.distributed.topology import build_topology
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.loss.losses import LOSSES


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_filled_in_the_type_of_its_parameters(family: str, tied: bool, tmp_path: Path) -> None:
    spec, args = tiny(family, tied=tied)
    state = random_weights(spec, args, torch.bfloat16)
    write_folder(tmp_path / "hf", spec, args, state, shards=3)
    model = spec.cls(args)
    load_weights(tmp_path / "hf", spec, args, dict(model.named_parameters()))
    assert same(dict(model.named_parameters()), {name: tensor.float() for name, tensor in state.items()})


LAYOUTS = {
    "dp2tp2": Parallelism(tensor_parallel_degree=2),
    "pp2dp2": Parallelism(pipeline_parallel_degree=2),
}
SPREAD = (("llama3", False), ("gpt2", True), ("qwen2", False))


def load_spread(world: World, root: Path) -> list[tuple[str, str, list[str], int]]:
    """Each model in each layout: the parameters of this rank that are not as they should be, all that it has, and how
    many numbers it read."""
    found, read = [], [0]
    plain_read = WeightFolder.read

    def counted(folder: WeightFolder, *arguments: object) -> torch.Tensor:
        tensor = plain_read(folder, *arguments)  # type: ignore[arg-type]
        read[0] += tensor.numel()
        return tensor

    WeightFolder.read = counted  # type: ignore[method-assign, assignment]
    for (family, tied), (layout, keys) in itertools.product(SPREAD, LAYOUTS.items()):
        spec, args = tiny(family, tied=tied)
        spread = plan_spread(keys, spec, args, world_size=world.size, seq_len=32, local_batch_size=2)
        runner = parallelize(
            spec,
            args,
            build_topology(spread.degrees, world),
            spread,
            loss=LOSSES.bind("cross_entropy", {}, key="loss")(),
            converters=[],
            device=world.device,
            seed=0,
            precision=Precision(param=torch.float32),
            cpu_offload=False,
        )
        parameters = dict(runner.named_parameters)
        read[0] = 0
        load_weights(root / f"{family}-{tied}", spec, args, parameters)
        state = random_weights(spec, args)
        for name, parameter in parameters.items():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), state[name]), f"{family} in {layout}: {name}"
        found.append((family, layout, list(parameters), read[0]))
    return found


def test_ranks_take_their_parts(tmp_path: Path) -> None:
    for family, tied in SPREAD:
        spec, args = tiny(family, tied=tied)
        write_folder(tmp_path / f"{family}-{tied}", spec, args, random_weights(spec, args), shards=2)
    ranks = run_ranks(load_spread, 4, tmp_path)
    for results in zip(*ranks, strict=True):
        family, layout = results[0][:2]
        state = random_weights(*tiny(family, tied=dict(SPREAD)[family]))
        assert set(itertools.chain(*(names for _, _, names, _ in results))) == state.keys()
        if layout == "pp2dp2":
            assert all(set(names) < state.keys() for _, _, names, _ in results)
        if family != "gpt2":  # whose matrices are stored as one, and the other way round
            total = sum(tensor.numel() for tensor in state.values())
            assert all(numbers < 0.4 * total for *_, numbers in results), "more was read than the part of a rank"


def test_either_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    spec, args = tiny("llama3", tied=True)
    state = random_weights(spec, args)
    head = {"lm_head.weight": state["tok_embeddings.weight"].clone()}
    write_folder(tmp_path / "both", spec, args, state, more=head)
    write_folder(tmp_path / "head", spec, args, state, more=head, without="model.embed_tokens.weight")
    write_folder(tmp_path / "neither", spec, args, state, without="model.embed_tokens.weight")
    for name in ("both", "head"):
        model = spec.cls(args)
        load_weights(tmp_path / name, spec, args, dict(model.named_parameters()))
        assert same(dict(model.named_parameters()), state)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing"):
        load_weights(tmp_path / "neither", spec, args, dict(spec.cls(args).named_parameters()))
    head["lm_head.weight"][100, 31] += 1
    write_folder(tmp_path / "other", spec, args, state, more=head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not what model\.embed_tokens\.weight is"):
        load_weights(tmp_path / "other", spec, args, dict(spec.cls(args).named_parameters()))


def test_masks_among_the_weights_are_passed_over(tmp_path: Path) -> None:
    spec, args = tiny("gpt2", tied=True)
    state = random_weights(spec, args)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8)}
    write_folder(tmp_path / "hf", spec, args, state, more=masks)
    model = spec.cls(args)
    load_weights(tmp_path / "hf", spec, args, dict(model.named_parameters()))
    assert same(dict(model.named_parameters()), state)


def test_nothing_is_changed_where_a_tensor_is_missing(tmp_path: Path) -> None:
    spec, args = tiny("llama3")
    write_folder(tmp_path / "hf", spec, args, random_weights(spec, args), without="model.norm.weight")
    model = spec.cls(args)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing, which holds norm\.weight"):
        load_weights(tmp_path / "hf", spec, args, dict(model.named_parameters()))
    assert same(dict(model.named_parameters()), before)


@pytest.mark.parametrize(
    ("family", "change", "key", "words"),
    [
        ("llama3", {"n_layers": 3}, "model.args.n_layers", "is 3 for this model, but .* has num_hidden_layers=2"),
        ("llama3", {"ffn_dim": 64}, "model.args.ffn_dim", "is 64 .* intermediate_size=48"),
        ("llama3", {"tie_word_embeddings": True}, "model.args.tie_word_embeddings", "is True .*=False"),
        ("gpt2", {"activation": "gelu"}, "model.args.activation", "is gelu .* activation_function=gelu_new"),
        ("qwen3", {}, "model.name", "is 'qwen3' .* model_type='llama'"),
    ],
)
def test_another_model_is_refused(family: str, change: dict[str, object], key: str, words: str, tmp_path: Path) -> None:
    spec, args = tiny("llama3" if family == "qwen3" else family)
    write_folder(tmp_path / "hf", spec, args, random_weights(spec, args))
    spec, args = tiny(family, **change)
    with pytest.raises(ConfigError, match=words) as refused:
        load_weights(tmp_path / "hf", spec, args, dict(spec.cls(args).named_parameters()))
    assert refused.value.key == key and "\n" not in str(refused.value)


def test_another_rate_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, args = tiny("llama3")
    write_folder(tmp_path / "hf", spec, args, random_weights(spec, args))
    said: list[str] = []
    monkeypatch.setattr(huggingface, "note_once", said.append)
    spec, args = tiny("llama3", norm_eps=1e-6)
    load_weights(tmp_path / "hf", spec, args, dict(spec.cls(args).named_parameters()))
    (note,) = said
    assert note.startswith("model.args.norm_eps: ") and note.endswith("has rms_norm_eps=1e-05, and it is 1e-06 now")


# Folders that must be refused

INDEX, FIRST, SECOND = "model.safetensors.index.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / file).read_text()
        assert old in content
        (folder / file).write_text(content.replace(old, new, 1))

    return change


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, size)


def put(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


def only_pickles(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(pickle.dumps(Creates(folder.parent / "created")))


def fifo(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)


def f8(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / SECOND)


def beside(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder.parent / "x.safetensors")
    edit(INDEX, f'"{SECOND}"', '"../x.safetensors"')(folder)


class Creates:
    """Pickled, it creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


TWICE = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("spoil", "file", "words"),
    [
        (lambda folder: (folder / SECOND).unlink(), SECOND, f"is missing, which {INDEX} names"),
        (cut(SECOND, 5000), SECOND, "is damaged"),
        (cut(SECOND, 4), SECOND, "is damaged"),
        (put(SECOND, struct.pack("<Q", 1 << 60) + b"{}"), SECOND, "is damaged"),
        (put(SECOND, header('{"a": 3}')), SECOND, "is damaged"),
        (put(SECOND, header(TWICE, b"1234")), SECOND, "a stands there twice"),
        (f8, SECOND, "holds model.norm.weight as F8_E4M3; what is read are F64, F32"),
        (put(SECOND, b"\x80\x04 a pickle"), SECOND, "is damaged"),
        (fifo, SECOND, "is missing"),
        (edit(INDEX, SECOND, FIRST), FIRST, f"lacks model.layers.0.input_layernorm.weight, which {INDEX}"),
        (edit(INDEX, f'"{SECOND}"', '"/etc/model.safetensors"'), INDEX, "lies in '/etc/model.safetensors'"),
        (edit(INDEX, f'"{SECOND}"', '"pytorch_model.bin"'), INDEX, "lies in 'pytorch_model.bin'"),
        (edit(INDEX, f'"{SECOND}"', "3"), INDEX, "lies in 3"),
        (beside, INDEX, "lies in '../x.safetensors'"),
        (edit(INDEX, '"model.norm.weight"', '"lm_head.weight"'), INDEX, "lm_head.weight stands there twice"),
        (put(INDEX, b'{"metadata": {}}'), INDEX, "has no weight_map"),
        (put(INDEX, b"[]"), INDEX, "it is no table"),
        (put(INDEX, b"[" * 100_000), INDEX, "cannot be read"),
        (put(INDEX, b" " * (17 << 20)), INDEX, "larger than 16 MiB"),
        (put("config.json", b'{"model_type": "ll\xffma"}'), "config.json", "can't decode"),
        (edit("config.json", '"hidden_size"', '"vocab_size"'), "config.json", "vocab_size stands there twice"),
        (lambda folder: (folder / "config.json").unlink(), "config.json", "is missing"),
        (only_pickles, "pytorch_model-00001-of-00002.bin", "is a pickle, which could run code and is never read"),
        (lambda folder: [path.unlink() for path in folder.glob("model*")], "hf", "holds no weights"),
        (lambda folder: (folder / INDEX).unlink(), FIRST, "nothing that says which belong together"),
        (edit("config.json", '"silu"', '"gelu"'), "config.json", "hidden_act='gelu'"),
        (edit(INDEX, '"model.norm.weight"', '"model.norm.wait"'), SECOND, "lacks model.norm.wait"),
    ],
)
def test_a_folder_that_is_not_as_it_says(
    spoil: Callable[[Path], object], file: str, words: str, tmp_path: Path
) -> None:
    spec, args = tiny("llama3")
    write_folder(tmp_path / "hf", spec, args, random_weights(spec, args), shards=2)
    spoil(tmp_path / "hf")
    model = spec.cls(args)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        load_weights(tmp_path / "hf", spec, args, dict(model.named_parameters()))
    line = str(refused.value)
    assert file in line and words in line and "\n" not in line and len(line) < 600
    assert same(dict(model.named_parameters()), before)
    assert not (tmp_path / "created").exists()


def test_a_pickle_beside_is_not_opened(tmp_path: Path) -> None:
    spec, args = tiny("llama3")
    write_folder(tmp_path / "hf", spec, args, random_weights(spec, args))
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(pickle.dumps(Creates(tmp_path / "created")))
    load_weights(tmp_path / "hf", spec, args, dict(spec.cls(args).named_parameters()))
    assert not (tmp_path / "created").exists()
    pickle.loads((tmp_path / "hf" / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "created").exists(), "it would have been seen"


def test_a_url_and_a_file_are_no_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a URL; weights are read from a folder of this machine"):
        WeightFolder("s3://bucket/llama")
    with pytest.raises(CheckpointError, match="is not a folder"):
        WeightFolder(tmp_path / "nowhere")
