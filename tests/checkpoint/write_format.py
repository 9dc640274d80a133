"""Writes ``formats/N``, a step as the present code saves it, once: ``python -m tests.checkpoint.write_format``.

What a stored step must still do is in ``test_formats.py``.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.launch import run_ranks
from tests.runs import Outcome, run_jobs, tiny_text
from torchtitan.checkpoint.manifest import FORMAT
from torchtitan.distributed.world import World

FORMATS = Path(__file__).parent / "formats"
RANKS, SAVED, STEPS = 2, 4, 6
ARGV = [
    "--job.description=a stored step",
    "--model.args={dim=4, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=258, multiple_of=2}",
    "--tokenizer.name=bytes",
    "--data.bos_id=256",
    "--data.eos_id=257",
    "--training.dataset=jsonl",
    "--training.dataset_path=text.jsonl",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--optimizer.name=AdamW",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.total_steps=20",
    "--metrics.peak_tflops=1",
    "--metrics.log_freq=1",
    "--metrics.no_enable_tensorboard",
    "--checkpoint.enable",
    f"--checkpoint.interval={SAVED}",
]
README = f"""\
# A step of format {{format}}

`step-{SAVED}` was saved on {RANKS} ranks by `python -m tests.checkpoint.write_format`, whose overrides are those in
`step-{SAVED}/config.toml`; `text.jsonl` is what `tiny_text` of `tests/runs.py` writes. `expected.json` holds the
losses of the steps after it in a run that was not interrupted. A stored step is never written again: a new format gets
a folder of its own.
"""


def write(world: World, folder: Path) -> list[Outcome]:
    """A run that goes through and one that ends at the step to keep, in ``outputs`` of ``folder``."""
    os.chdir(folder)  # what is stored names no folder of this machine
    through = [*ARGV, "--job.dump_folder=./through", f"--training.steps={STEPS}"]
    return run_jobs(world, [through, [*ARGV, f"--training.steps={SAVED}"]])


def main() -> None:
    target = FORMATS / str(FORMAT)
    if target.exists():
        sys.exit(f"{target} is there: a stored step is never written again")
    with tempfile.TemporaryDirectory() as name:
        tiny_text(Path(name))
        through, half = run_ranks(write, RANKS, Path(name))[0]
        assert half.losses == through.losses[:SAVED]
        shutil.copytree(Path(name) / "outputs" / "checkpoint", target)
    (target / "README.md").write_text(README.format(format=FORMAT))
    (target / "expected.json").write_text(json.dumps({"losses": through.losses[SAVED:]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
