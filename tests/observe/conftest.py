"""The log as the tests of this room read it, and a quiet place to measure."""

import logging
from collections.abc import Iterator

import pytest
import torch

from torchtitan.log import logger


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What torchtitan's logger says."""
    level, propagate = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # init_logger may have been called or not
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Times that other processes on the machine disturb little: two threads wait for each other, and for theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
