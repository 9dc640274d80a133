"""Builds, installs and runs the package as a stranger would: python scripts/prove_packaging.py [PYTHON]

Source archive → wheel built from it → a new virtual environment of PYTHON (default: this one) with the wheel and all
its dependencies → the debug model, 20 steps, in a folder that is not the checkout. Prints sizes, seconds and losses;
ends with 1 where something fails. Downloads what pip has not cached, and needs room for another torch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
STEPS = 20


def timed(what: str, command: list[str | Path], folder: Path) -> None:
    """Run ``command`` in ``folder``, where nothing leads to the checkout; its output is shown if it fails."""
    away = ("PYTHONPATH", "CONFIG_FILE", "NGPU", "LOG_RANK", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in away}
    start = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(f"{what:34s} {time.perf_counter() - start:7.1f} s", flush=True)
    if ended.returncode:
        sys.exit(f"{ended.stdout.decode()}\n{what} failed with {ended.returncode}")


def size(path: Path) -> int:
    """Bytes of a file, or of all in a folder."""
    return path.stat().st_size if path.is_file() else sum(p.lstat().st_size for p in path.rglob("*"))


def main(interpreter: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        python, run = work / "venv" / "bin" / "python", work / "elsewhere"
        run.mkdir()
        timed("new environment", [interpreter, "-m", "venv", work / "venv"], work)
        timed("setuptools", [python, "-m", "pip", "install", "--quiet", "setuptools>=77"], work)
        timed("source archive", [python, "-c", SDIST, work / "sdist"], CHECKOUT)
        (sdist,) = (work / "sdist").iterdir()
        # Its build environment is pip's own, made from what pyproject.toml asks for.
        timed("wheel", [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", work / "wheel", sdist], work)
        (wheel,) = (work / "wheel").iterdir()
        print(f"{sdist.name}: {size(sdist):,} bytes; {wheel.name}: {size(wheel):,} bytes")
        timed("wheel and dependencies", [python, "-m", "pip", "install", "--quiet", wheel], work)
        print(f"environment: {size(work / 'venv') / 2**20:,.0f} MiB")
        timed("no dependency is missing", [python, "-m", "pip", "check"], work)
        command = [python, "-m", "torchtitan.launch", "--training.steps", str(STEPS)]
        timed(f"debug model, {STEPS} steps", command, run)
        lines = [json.loads(line) for line in (run / "outputs" / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == STEPS and lines[-1]["loss"] < lines[0]["loss"] - 0.5, lines[-1]
        print(f"loss {lines[0]['loss']:.5f} → {lines[-1]['loss']:.5f}, {lines[-1]['tps']:,.0f} tokens a second")
        preset = [python, "-m", "torchtitan.config", "print", "--job.config_file", "llama3_8b"]
        timed("a preset by name", preset, run)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else sys.executable)
