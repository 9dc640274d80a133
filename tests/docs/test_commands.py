"""What the documentation tells a reader to type is read: keys, presets, modules, scripts and extras exist.

That the README's first commands train and test is proved by .ci/run, which runs them.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.docs.commands import commands
from tests.docs.commands import main as read_document
from tests.launch import run_main

DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])


def problems(file: Path, folder: Path) -> list[str]:
    """Of one file, read in a process of its own."""
    code, printed = run_main(read_document, [str(file), str(folder)], folder=folder)
    assert code == 0, printed
    found: list[str] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_what_a_document_says_to_type_would_work(file: Path, tmp_path: Path) -> None:
    assert problems(file, tmp_path) == []


def test_there_is_something_to_read() -> None:
    found = list(commands((CHECKOUT / "README.md").read_text()))
    for command in (
        "./run_train.sh",
        "CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --model.hf_assets_path path/to/Llama-3.1-8B "
        "--training.seq_len 4096",
        "python scripts/compare_runs.py runs/one runs/four",
        "python -m torchtitan.config explain optimizer --job.imports my_parts",
        "torchrun … -m torchtitan.train --job.config_file F",
    ):
        assert command in found, command


WRONG = """
```
./run_train.sh --training.stesp 10
NGPU=two ./run_train.sh
CONFIG_FILE=train_configs/llama3_9b.toml ./run_train.sh
python scripts/compare_run.py A B
```

Type `python -m torchtitan.config explain optimizer.lrr`, `python -m torchtitan.confg`, `pip install -e '.[tests]'`,
`torchrun … -m torchtitan.train --job.config_file F --metrics.sinks pigeon`, `--optimizer.name
Adamw` or `python -m torchtitan.config shows`. Set `optimizer.beta3`, never
`training.step = 5`.

```toml
[parallelism]
tensor_parallel_degrees = 2
```
"""
RIGHT = """
```bash
$ PYTHONPATH=. ./run_train.sh --job.imports right_parts \\
    --optimizer.name Right --optimizer.alpha 0.5   # a comment
pip install -e '.[dev]' && python -m torchtitan.train --job.config_file FILE --training.steps N --section.key value
python -m torchtitan.config print|check|explain --job.config_file llama3_8b
```

`NGPU=N ./run_train.sh […]` takes `metrics.jsonl`, `--training.dataset text`, `model.args.*` and
`lr_scheduler.decay_type`.

```python
# right_parts.py, anywhere
from torchtitan.optim.optimizers import OPTIMIZERS

@OPTIMIZERS.register("Right")
def right(groups, *, alpha: float = 0.1): ...
```

```toml
[job]
imports = ["right_parts"]
[optimizer]
name = "Right"
alpha = 0.9
```
"""


def test_what_would_not_work_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.md").write_text(WRONG)
    found = problems(tmp_path / "wrong.md", tmp_path)
    for start, what in (
        ("./run_train.sh --training.stesp 10:", "did you mean training.steps?"),
        ("NGPU=two ./run_train.sh:", "no number"),
        ("CONFIG_FILE=train_configs/llama3_9b.toml ./run_train.sh:", "did you mean train_configs/llama3_8b.toml?"),
        ("python scripts/compare_run.py A B:", "there is no scripts/compare_run.py"),
        ("python -m torchtitan.config explain optimizer.lrr:", "did you mean optimizer.lr?"),
        ("python -m torchtitan.confg:", "there is no torchtitan.confg"),
        ("pip install -e '.[tests]':", "there is no extra tests"),
        ("torchrun … -m torchtitan.train --job.config_file F --metrics.sinks pigeon:", "unknown metric sink"),
        ("--optimizer.name Adamw:", "did you mean AdamW?"),
        ("python -m torchtitan.config shows:", "no command shows"),
        ("optimizer.beta3:", "there is no such key"),
        ("training.step:", "did you mean training.steps?"),
        ("[parallelism] …:", "did you mean parallelism.tensor_parallel_degree?"),
    ):
        assert any(line.startswith(start) and what in line for line in found), (start, found)
    assert len(found) == 13


def test_what_would_work_is_not(tmp_path: Path) -> None:
    (tmp_path / "right.md").write_text(RIGHT)
    assert problems(tmp_path / "right.md", tmp_path) == []
