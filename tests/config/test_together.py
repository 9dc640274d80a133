"""Keys that contradict each other: each pair is refused by the key to change."""

import pytest

from torchtitan.config import ConfigError, load_config

SOURCES = "data.sources=[{dataset = 'python_docs'}]"


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["lr_scheduler.total_steps=5", "training.steps=6"], "lr_scheduler.total_steps", "training.steps=6"),
        (["data.bos_id=1", "data.bos_token=<s>"], "data.bos_token", "data.bos_id is given as well"),
        (["data.eos_id=1", "data.eos_token=<s>"], "data.eos_token", "data.eos_id is given as well"),
        (["data.bos_id=1", "data.add_bos=false"], "data.bos_id", "none is added with data.add_bos = false"),
        (["data.eos_token=<s>", "data.add_eos=false"], "data.eos_token", "none is added with data.add_eos = false"),
        ([SOURCES, "training.dataset=text"], "training.dataset", "data.sources names the data sets"),
        ([SOURCES, "training.dataset_path=x"], "training.dataset_path", "data.sources names the data sets"),
        (["training.dataloader.prefetch_factor=2"], "training.dataloader.prefetch_factor", "no workers"),
        (["checkpoint.load_step=3"], "checkpoint.load_step", "checkpoint.enable = true"),
        (["checkpoint.initial_load_path=x"], "checkpoint.initial_load_path", "checkpoint.enable = true"),
        (["checkpoint.last_save_in_hf=true"], "checkpoint.last_save_in_hf", "checkpoint.enable = true"),
        (
            ["checkpoint.enable=true", "checkpoint.load_only=true", "checkpoint.async_mode=async"],
            "checkpoint.async_mode",
            "checkpoint.load_only",
        ),
        (["checkpoint.enable=true", "checkpoint.export_dtype=bfloat16"], "checkpoint.export_dtype", "left alone"),
        (
            ["checkpoint.enable=true", "checkpoint.initial_load_in_hf=true"],
            "checkpoint.initial_load_in_hf",
            "say where",
        ),
        (
            [
                "checkpoint.enable=true",
                "checkpoint.initial_load_path=x",
                "checkpoint.initial_load_in_hf=true",
                "checkpoint.initial_load_model_only=false",
            ],
            "checkpoint.initial_load_model_only",
            "weights only",
        ),
    ],
)
def test_two_keys_that_contradict_each_other(words: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_config([f"--{word}" for word in words])
    assert refused.value.key == key
