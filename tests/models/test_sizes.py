"""Numbers of parameters of the published sizes, as their makers count them, and of the small ones, by hand."""

import pytest

from torchtitan.models.spec import MODELS

# vocab*dim (twice if untied) + layers * (dim*(q + 2 kv) + q*dim + 3*dim*hidden + 2*dim) + dim
LLAMA3 = 2 * 2048 * 256 + 6 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256) + 256
QWEN3 = 2048 * 256 + 6 * (256 * (512 + 2 * 256) + 512 * 256 + 3 * 256 * 768 + 2 * 256 + 2 * 64) + 256
QWEN2 = 2048 * 256 + 6 * (256 * (256 + 2 * 64) + (256 + 2 * 64) + 256 * 256 + 3 * 256 * 768 + 2 * 256) + 256
# (vocab + positions)*dim + layers * (4 dim*(dim + 1) + 8 dim*dim + 5 dim + 4 dim) + 2 dim
GPT2 = (2048 + 2048) * 256 + 6 * (4 * 256 * 257 + 8 * 256 * 256 + 9 * 256) + 2 * 256

COUNTS = {
    ("llama3", "debugmodel"): LLAMA3,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("qwen3", "debugmodel"): QWEN3,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen2", "debugmodel"): QWEN2,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("gpt2", "debugmodel"): GPT2,
    ("gpt2", "124M"): 124_439_808,
    ("gpt2", "355M"): 354_823_168,
    ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1558M"): 1_557_611_200,
}


@pytest.mark.parametrize("family", sorted({family for family, _ in COUNTS}))
def test_parameter_counts(family: str) -> None:
    spec = MODELS.get(family)
    counted = {(family, flavor): spec.count_parameters(args) for flavor, args in spec.flavors.items()}
    assert counted == {key: count for key, count in COUNTS.items() if key[0] == family}


@pytest.mark.parametrize("family", MODELS.names())
def test_every_family_has_a_model_for_a_laptop(family: str) -> None:
    """Its vocabulary is that of the tokenizer that is used where none is named."""
    spec = MODELS.get(family)
    small = spec.flavors["debugmodel"]
    assert small.vocab_size == 2048 and spec.count_parameters(small) <= 10e6
