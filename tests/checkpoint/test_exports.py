"""What a run leaves for others at its end, and takes from them at its start."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open

from tests.launch import RanksFailed, run_ranks
from tests.runs import Outcome, run_jobs, tiny_argv
from torchtitan.checkpoint.__main__ import main
from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.places import place
from torchtitan.checkpoint.storage import is_complete
from torchtitan.config import load_config
from torchtitan.errors import ConfigError
from torchtitan.resolve.checkpoints import finished_step
from torchtitan.resolve.job import resolve_job

SAVES = ["--checkpoint.enable", "--checkpoint.interval=2", "--lr_scheduler.total_steps=20"]
IN_HF = ["--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, Outcome]:
    """A folder with two runs of four steps on two ranks: one that left its weights in bfloat16, one a Hugging Face
    model in float32 with a tokenizer."""
    folder = tmp_path_factory.mktemp("ended")
    assets = Path(__file__).parents[2] / "torchtitan/assets"
    tokenizer = next(assets.rglob("tokenizer.json"))
    model_only = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16"]
    hf = ["--checkpoint.last_save_in_hf", "--model.args.vocab_size=2050", "--model.args.tie_word_embeddings"]
    hf += ["--tokenizer.name=hf", f"--model.hf_assets_path={tokenizer}", "--data.bos_id=0", "--data.eos_id=1"]
    plain, exported = run_ranks(
        run_jobs,
        2,
        [
            tiny_argv(folder, *SAVES, *model_only, "--training.steps=4", run="plain"),
            tiny_argv(folder, *SAVES, *hf, "--training.steps=4", "--parallelism.pipeline_parallel_degree=2", run="hf"),
        ],
    )[0]
    return folder, plain, exported


def test_weights_alone_lie_beside_the_last_full_step(ended: tuple[Path, Outcome, Outcome]) -> None:
    folder, outcome, _ = ended
    checkpoints = folder / "plain" / "checkpoint"
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-4", "step-4-export"}
    reader = Reader(place(str(checkpoints / "step-4-export"), key="test"))
    assert set(reader.tensors) == set(outcome.weights) and not reader.values
    for name, weight in outcome.weights.items():
        assert torch.equal(reader.tensor(name), weight.bfloat16()), name
    assert main(["verify", str(folder / "plain")]) == 0


def test_a_hugging_face_model_lies_there_and_gives_the_same_logits(ended: tuple[Path, Outcome, Outcome]) -> None:
    from transformers import AutoModelForCausalLM

    folder, _, outcome = ended
    export = folder / "hf" / "checkpoint" / "step-4-export"
    assert is_complete(place(str(export), key="test"))
    names = {path.name for path in export.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "manifest.json"} <= names
    assert "lm_head.weight" not in load_file(export / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
    job = resolve_job(load_config(hf_argv(folder, "again")), 1)
    ours = job.spec.cls(job.args)
    ours.load_state_dict({**outcome.weights, "output.weight": outcome.weights["tok_embeddings.weight"]})
    tokens = torch.randint(0, 2050, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(tokens, torch.arange(24).expand(2, -1))
        assert (theirs(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def hf_argv(folder: Path, run: str, *overrides: str) -> list[str]:
    model = ["--model.args.vocab_size=2050", "--model.args.tie_word_embeddings", "--training.steps=1"]
    start = f"--checkpoint.initial_load_path={folder / 'hf' / 'checkpoint' / 'step-4-export'}"
    return tiny_argv(folder, *SAVES, *model, start, "--checkpoint.initial_load_in_hf", *overrides, run=run)


def test_a_run_starts_from_a_hugging_face_model_in_any_layout(ended: tuple[Path, Outcome, Outcome]) -> None:
    folder, _, outcome = ended
    layouts: list[list[str]] = [
        [],
        ["--parallelism.tensor_parallel_degree=2"],
        ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=6"],
    ]
    argvs = [
        hf_argv(folder, f"from-{n}", "--optimizer.lr=1e-30", *layout) for n, layout in enumerate(layouts)
    ]  # a rate that moves nothing
    for started in run_ranks(run_jobs, 2, argvs)[0]:
        assert started.steps == [1]
        for name, weight in outcome.weights.items():
            assert torch.equal(started.weights[name], weight), name


def test_an_export_that_is_missing_is_made_up_for_and_steps_can_be_raised(
    ended: tuple[Path, Outcome, Outcome], tmp_path: Path
) -> None:
    folder, outcome, _ = ended
    shutil.copytree(folder / "plain", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-4-export")  # killed before it was there
    asked = ["--training.steps=4", *IN_HF]
    config = load_config(tiny_argv(tmp_path, *SAVES, *asked))
    assert finished_step(config) is None
    again, more = run_ranks(
        run_jobs, 1, [tiny_argv(tmp_path, *SAVES, *asked), tiny_argv(tmp_path, *SAVES, *IN_HF, "--training.steps=6")]
    )[0]
    assert again.steps == [1, 2, 3, 4] and more.steps == [1, 2, 3, 4, 5, 6]
    assert more.losses[:4] == outcome.losses
    assert finished_step(config) == 6
    with safe_open(tmp_path / "run" / "checkpoint" / "step-6-export" / "model.safetensors", "pt") as file:
        assert {str(file.get_slice(name).get_dtype()) for name in file.keys()} == {"BF16"}  # noqa: SIM118
    config_json = json.loads((tmp_path / "run" / "checkpoint" / "step-6-export" / "config.json").read_text())
    assert config_json["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.args.n_layers=3"], "model.args.n_layers: is 3 for this model"),
        (["--model.name=qwen3", "--model.args={}", "--tokenizer.name=bytes"], "model.name: this family is 'qwen3'"),
        (["--checkpoint.no_initial_load_in_hf"], "checkpoint.initial_load_path: a Hugging Face model lies there"),
        (["--checkpoint.initial_load_path=/nowhere"], "checkpoint.initial_load_path: /nowhere is not a folder"),
        (["--checkpoint.initial_load_path=s3://b/x"], "checkpoint.initial_load_path: s3://b/x is a URL"),
    ],
)
def test_another_model_is_refused_before_anything_starts(
    ended: tuple[Path, Outcome, Outcome], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_job(load_config(hf_argv(ended[0], "refused", *overrides)), 1)
    assert f"{caught.value.key}: {caught.value.problem}".startswith(message)


def test_a_last_export_that_fails_is_an_error(ended: tuple[Path, Outcome, Outcome], tmp_path: Path) -> None:
    shutil.copytree(ended[0] / "plain", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-4-export")
    (tmp_path / "run" / "checkpoint" / "step-4-export.partial").write_text("in the way")
    with pytest.raises(RanksFailed, match="step 4 export could not be saved"):
        run_ranks(run_jobs, 1, [tiny_argv(tmp_path, *SAVES, *IN_HF, "--training.steps=4")])
