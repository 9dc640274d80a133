"""metrics.jsonl and validation.jsonl: their fields, what a resume cuts, what a full disk leaves."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.observe.records import HOST_MEMORY, STATS, build_metrics, build_record, build_sink, build_validation_record
from torchtitan.observe.lines import JsonLines, cut_lines

FIELDS = [
    *["step", "loss", "max_loss", "grad_norm", "lr", "tokens_seen", "tps", "tflops", "mfu", "mfu_causal"],
    *["memory_gib", "data_loading_seconds", "step_seconds", "wall_time"],
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_jsonl_has_the_fields_at_full_precision_and_at_once(tmp_path: Path) -> None:
    sink = build_sink("jsonl", tmp_path)
    record = build_record(loss=2.0 / 3.0)
    sink.write(record)
    (line,) = lines_of(tmp_path / "metrics.jsonl")  # before the file is closed
    sink.close()
    assert list(line) == FIELDS
    assert line == {name: record[name] for name in FIELDS}
    assert isinstance(line["step"], int)
    assert isinstance(line["tokens_seen"], int)


def test_jsonl_says_null_of_what_does_not_apply_or_is_not_finite(tmp_path: Path) -> None:
    sink = build_sink("jsonl", tmp_path)
    stats = replace(STATS, max_loss=None, loss=math.nan, grad_norm=math.inf)
    sink.write(build_metrics(peak_flops=None, memory=lambda: HOST_MEMORY).write(stats))
    sink.close()
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert {name for name in FIELDS if line[name] is None} == {"loss", "max_loss", "grad_norm", "mfu", "mfu_causal"}


def write_steps(folder: Path, steps: range, resumed_step: int = 0) -> None:
    sink = build_sink("jsonl", folder, resumed_step)
    for step in steps:
        sink.write(build_record(step))
    sink.close()


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines_of(folder / "metrics.jsonl")]


@pytest.mark.parametrize(("resumed_step", "kept"), [(20, range(1, 21)), (12, range(1, 13)), (35, range(1, 31))])
def test_jsonl_goes_on_after_the_step_it_resumes(tmp_path: Path, resumed_step: int, kept: range) -> None:
    write_steps(tmp_path, range(1, 31))
    write_steps(tmp_path, range(resumed_step + 1, resumed_step + 3), resumed_step)
    assert steps_of(tmp_path) == [*kept, resumed_step + 1, resumed_step + 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "lo', b'{"step": 4}', b"\xff\xfe\n", b"[4]\n", b'{"loss": 1.0}\n', b"\n"]
)
def test_jsonl_drops_torn_lines(tmp_path: Path, torn: bytes) -> None:
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    write_steps(tmp_path, range(5, 7), 4)
    assert steps_of(tmp_path) == [1, 2, 3, 5, 6]


def test_jsonl_is_cut_in_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, range(1, 31))
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()

    def killed(source: Path, target: Path) -> None:
        assert path.read_bytes() == before
        assert len(source.read_bytes().splitlines()) == 10
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cut_lines(path, 10)
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_with_nothing_to_cut_is_not_rewritten(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").stat()
    write_steps(tmp_path, range(0), 3)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_line_that_did_not_fit_on_the_disk_leaves_nothing_of_itself(tmp_path: Path) -> None:
    class Full:
        """A file on a disk with room for ten more bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self.file.write(data[: self.room])
            self.room -= written
            return int(written)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    lines = JsonLines(tmp_path / "metrics.jsonl", 0)
    lines.append(build_record(1))
    file, lines._file = lines._file, Full(lines._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        lines.append(build_record(2))
    lines._file = file
    lines.append(build_record(3))
    lines.close()
    assert steps_of(tmp_path) == [1, 3]


def test_a_new_run_keeps_the_lines_of_the_one_before_it(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 31))
    write_steps(tmp_path, range(1, 3), 0)
    assert steps_of(tmp_path) == [1, 2]
    (earlier,) = tmp_path.glob("metrics-*.jsonl")
    assert len(earlier.read_text().splitlines()) == 30


def validate_steps(folder: Path, steps: range, resumed_step: int = 0) -> None:
    sink = build_sink("jsonl", folder, resumed_step)
    for step in steps:
        for name in ("wiki", "code"):
            sink.validated(build_validation_record(step=step, set=name))  # type: ignore[attr-defined]
    sink.close()


def test_validation_has_a_file_of_its_own(tmp_path: Path) -> None:
    sink = build_sink("jsonl", tmp_path)
    assert not (tmp_path / "validation.jsonl").exists()  # a run without validation has none
    record = build_validation_record(loss=2.0 / 3.0)
    sink.validated(record)  # type: ignore[attr-defined]
    sink.validated(build_validation_record(loss=math.nan, set=None))  # type: ignore[attr-defined]
    first, second = lines_of(tmp_path / "validation.jsonl")
    sink.close()
    assert list(first) == ["step", "set", "loss", "tokens", "seconds"]
    assert first == {"step": 20, "set": "wiki", "loss": 2.0 / 3.0, "tokens": 40_000, "seconds": 2.0}
    assert second["loss"] is None and second["set"] is None


def test_validation_goes_on_after_the_step_that_the_run_resumes(tmp_path: Path) -> None:
    validate_steps(tmp_path, range(1, 9))
    validate_steps(tmp_path, range(6, 8), resumed_step=5)
    assert [line["step"] for line in lines_of(tmp_path / "validation.jsonl")] == [
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        6,
        6,
        7,
        7,
    ]
    build_sink("jsonl", tmp_path, resumed_step=2).close()  # also where it validates no more
    assert [line["step"] for line in lines_of(tmp_path / "validation.jsonl")] == [1, 1, 2, 2]
    validate_steps(tmp_path, range(1, 2))
    assert [line["step"] for line in lines_of(tmp_path / "validation.jsonl")] == [1, 1]
    (earlier,) = tmp_path.glob("validation-*.jsonl")
    assert len(earlier.read_text().splitlines()) == 4
