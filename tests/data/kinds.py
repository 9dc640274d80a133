"""A job on each kind of data, from files of tens of kilobytes that are written here."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from tests.runs import tiny_argv
from torchtitan.data.__main__ import main

TEXTS = [f"{n} times {n} is {n * n}; and " * (1 + n % 7) for n in range(120)]


def _jsonl(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    return path


def _text(folder: Path) -> list[str]:
    (folder / "text").mkdir()
    for n in range(0, len(TEXTS), 30):
        (folder / "text" / f"{n:03d}.txt").write_text("\n".join(TEXTS[n : n + 30]))
    return _from("text", folder / "text")


def _gzipped(folder: Path) -> list[str]:
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(_jsonl(folder / "z").read_bytes()))
    return _from("jsonl", folder / "z.jsonl.gz")


def _parquet(folder: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": TEXTS}), folder / "x.parquet", row_group_size=25)
    return _from("parquet", folder / "x.parquet")


def _hub(folder: Path) -> list[str]:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved")
    return _from("hub", folder / "saved")


def _stream(folder: Path) -> list[str]:
    options = f"{{streaming = true, data_files = ['{_jsonl(folder / 's.jsonl')}'], documents_at_once = 7}}"
    return ["--training.dataset=hub", "--training.dataset_path=json", f"--data.args={options}"]


def _prepared(folder: Path, name: str, form: str) -> Path:
    source = _from("jsonl", _jsonl(folder / f"{name}.jsonl"))
    words = [f"--format={form}", "--workers=1", "--tokenizer.name=bytes", "--data.bos_id=256", "--data.eos_id=257"]
    assert main(["prepare", str(folder / name), *words, *source]) == 0
    return folder / name


def _nanoset(folder: Path) -> list[str]:
    return _from("nanoset", _prepared(folder, "n", "ds").with_suffix(".ds"))


def _megatron(folder: Path) -> list[str]:
    return _from("megatron", _prepared(folder, "m", "megatron"))


def _in_their_order(files: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    def job(folder: Path) -> list[str]:
        return [*files(folder), "--data.order=source", "--training.global_batch_size=10", "--training.steps=30"]

    return job


def _blend(folder: Path) -> list[str]:
    _text(folder)
    _jsonl(folder / "b.jsonl")
    sources = (
        f"{{dataset = 'text', dataset_path = '{folder / 'text'}', weight = 0.7}}",
        f"{{dataset = 'jsonl', dataset_path = '{folder / 'b.jsonl'}', weight = 0.3}}",
        f"{{dataset = 'jsonl', dataset_path = '{folder / 'b.jsonl'}', weight = 0.5, from_step = 5}}",
        f"{{dataset = 'text', dataset_path = '{folder / 'text'}', weight = 0.5, from_step = 5}}",
    )
    return [f"--data.sources=[{', '.join(sources)}]"]


def _from(dataset: str, path: Path) -> list[str]:
    return [f"--training.dataset={dataset}", f"--training.dataset_path={path}"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "text": _text,
    "jsonl": lambda folder: _from("jsonl", _jsonl(folder / "j.jsonl")),
    "jsonl, gzip": _gzipped,
    "parquet": _parquet,
    "hub, from disk": _hub,
    "hub, a stream": _stream,
    "nanoset": _nanoset,
    "megatron": _megatron,
    "nanoset, in its order": _in_their_order(_nanoset),
    "megatron, in its order": _in_their_order(_megatron),
    "blend in stages": _blend,
    "documents": lambda folder: [*_text(folder), "--data.packing=documents"],
    "documents of a stream": lambda folder: [*_stream(folder), "--data.packing=documents"],
    "best fit": lambda folder: [*_text(folder), "--data.packing=best_fit"],
}


def job_on(kind: str, folder: Path) -> list[str]:
    """The command line of a tiny run on ``kind``, whose files are written into ``folder``."""
    own = [word for word in tiny_argv(folder) if not word.startswith("--training.dataset")]
    return [*own, f"--data.cache_folder={folder / 'cache'}", *KINDS[kind](folder)]
