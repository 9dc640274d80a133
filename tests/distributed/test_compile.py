"""Compiling: no graph is made after the first step and the first validation, and when one is, it is told; what is
refused. That numbers stay the same is in equivalence/test_passes.py."""

from pathlib import Path

import pytest
import torch

from tests.distributed.recompiles import CASES, run_steps
from tests.distributed.test_activation_checkpoint import zero_bubble
from tests.launch import run_ranks
from torchtitan.config.schema import Compile
from torchtitan.distributed.compile import Graphs, compile_loss
from torchtitan.distributed.passes import check_compile
from torchtitan.distributed.spread import Spread
from torchtitan.errors import ConfigError
from torchtitan.log import logger


@pytest.mark.parametrize("case", ["one process"])
def test_nothing_is_compiled_again(tmp_path: Path, case: str) -> None:
    found = run_ranks(run_steps, 1, tmp_path, CASES[case], 50, "aot_eager", timeout=280)[0]
    print(found)
    assert found.steps == 50 and found.rounds >= 5
    assert found.graphs == 4, "of blocks and loss, in training and in validation"
    assert found.again == 0


def test_what_is_compiled_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs()
    loss = compile_loss(lambda logits, labels: (logits * labels).sum(), "eager")
    caplog.set_level("INFO", logger.name)
    for step, (size, at) in enumerate([(3, "training"), (4, "validation"), (3, "training"), (5, "training")], 1):
        loss(torch.ones(size), torch.ones(size))
        graphs.look(at, step)
    told = [record.getMessage().split(",")[0] for record in caplog.records if record.name == logger.name]
    assert told == [
        "torch.compile made 1 graph for training",
        "torch.compile made 1 graph for validation",
        "torch.compile made 1 more graph in training at step 4",
    ]
    assert graphs.again == 1


@pytest.mark.parametrize(
    ("keys", "spread", "says"),
    [
        ({}, zero_bubble(), "^compile.enable: the pipeline's ZBVZeroBubble computes gradients of inputs"),
        ({"backend": "inducter"}, Spread(), "^compile.backend: unknown backend 'inducter'; did you mean inductor"),
        ({}, Spread(), "^compile.backend: inductor needs a C.. compiler on a CPU, and there is no /no/such"),
    ],
)
def test_refusals(keys: dict[str, str], spread: Spread, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such")
    with pytest.raises(ConfigError, match=says):
        check_compile(Compile(enable=True, **keys), spread, on_cpu=True)
    check_compile(Compile(**keys), spread, on_cpu=True)
    check_compile(Compile(enable=True, backend="aot_eager"), Spread(), on_cpu=True)
    check_compile(Compile(enable=True), Spread(), on_cpu=False)
