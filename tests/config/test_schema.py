"""The schema itself: every key is described, and its default is one that it would accept."""

import pytest
from pydantic import ValidationError

from torchtitan.config import ConfigError, JobConfig
from torchtitan.config.schema import KEYS, SECTIONS, LRScheduler, Training
from torchtitan.config.together import check_together
from torchtitan.errors import UNKNOWN
from torchtitan.resolve.job import resolve_job


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_described_and_accepts_its_default(key: str) -> None:
    option = KEYS[key]
    assert option.doc and not option.doc.endswith(".")
    assert option.read(option.default, key=key) == option.default
    assert not option.required


def test_every_section_is_described() -> None:
    assert all(meaning and not meaning.endswith(".") for meaning in SECTIONS.values())
    assert {key.rpartition(".")[0] for key in KEYS} == set(SECTIONS)


def test_a_configuration_can_be_built_in_code() -> None:
    config = JobConfig(training=Training(steps=3))
    assert (config.training.steps, config.training.seq_len) == (3, 2048)
    assert config.source("training.steps") == "default"
    with pytest.raises(ValidationError):
        Training(steps="3")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Training(step=3)  # type: ignore[call-arg]


def test_value_and_source_of_what_there_is_not() -> None:
    assert JobConfig().value("training.step") is UNKNOWN
    assert JobConfig().value("model.args.dim") is UNKNOWN
    assert JobConfig().value("training.dataset_path") is None


def test_configurations_that_say_the_same_are_equal() -> None:
    one, other = JobConfig(), JobConfig()
    other._sources["training.steps"] = "job.toml"
    assert one == other
    assert one != JobConfig(training=Training(steps=3))
    assert one != "training"


def test_the_cross_checks_hold_for_configurations_built_in_code() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_job(JobConfig(lr_scheduler=LRScheduler(total_steps=5), training=Training(steps=6)), 1)
    assert caught.value.key == "lr_scheduler.total_steps"
    check_together(JobConfig(lr_scheduler=LRScheduler(total_steps=6), training=Training(steps=6)))
