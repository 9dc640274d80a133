"""Schedules from files: what torch dumps is understood, and what would fail later is refused at once."""

from pathlib import Path

import pytest

from tests.distributed.test_schedules import of_torch
from torchtitan.distributed.schedule_file import KEY, read_order
from torchtitan.distributed.schedules import order_of
from torchtitan.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "own.csv"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "LoopedBFS", "InterleavedZeroBubble"]
)
def test_dumps_of_torch_are_read(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "dump.csv")
    of_torch(name, 2, 4, 6)._dump_csv(path, "compute_only")
    assert read_order(path, 2) == order_of(name, 2, 4, 6)


def test_empty_cells_and_lines_at_the_end_are_nothing(tmp_path: Path) -> None:
    order = read_order(write(tmp_path, "0F0,,,0B0\n,1F0, 1B0 ,\n\n,,\n"), 2)
    assert [[str(action) for step in steps for action in step] for steps in order] == [["0F0", "0B0"], ["1F0", "1B0"]]


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0F1", "0G1", "row 1, column 2: '0G1' is no action; write stage"),
        ("0F1", "0F", "'0F' is no action"),
        ("0F1", "-1F1", "'-1F1' is no action"),
        ("1F1", "1F1 1B1", "row 2, column 3: '1F1 1B1' is no action"),
        ("0F1", "0SEND_F1", "0SEND_F1 is communication, which is put in when the file is read; dump it compute_only"),
        ("0F1", "(0F1;0F2)OVERLAP_F_B", "does not overlap a forward and a backward pass"),
        ("0F1", "(0F1;0W0)OVERLAP_F_B", "does not overlap a forward and a backward pass"),
        ("0F1", "(0F1;)OVERLAP_F_B", "is no action"),
        ("1F0,1B0,1F1,1B1\n", "", "has 1 rows, one for each rank, but parallelism.pipeline_parallel_degree=2"),
        ("1F0,1B0,1F1,1B1\n", "1F0,1B0,1F1,1B1\n2F0,2B0", "has 3 rows"),
        ("0F0,0F1,0B0,0B1", "", "row 1 is empty; give the rank a stage, or lower the degree"),
        ("0F1", "0F0", "row 1: 0F0 comes twice; leave out one"),
        ("0F1", "1F1", "row 2: 1F0 is of stage 1, which row 1 has; a stage is on one rank"),
        ("1", "2", "stage 1 is missing, though there is a stage 2; number the stages from 0"),
        ("0F1,0B0,0B1", "0F1,0B0", "0B1 is missing; each stage needs F and either B, or I and W, of every micro-batch"),
        ("0F0,0F1,0B0", "0F0,0B0", "0F1 is missing"),
        ("0B1", "0I1", "0W1 is missing"),
        ("0B1", "0B1,0I1,0W1", "0B1 and 0I1 are two backward passes; leave out one"),
        ("1F0,1B0,1F1,1B1", "1F1,1B1,1F0,1B0", "1F1 comes too early; the last stage takes its micro-batches in their"),
        ("0F0,0F1,0B0,0B1", "0F0,0B0,0F1,0B1", ""),
        ("0F0,0F1,0B0,0B1", "0F0,0B1,0F1,0B0", "rank 0 waits at 0B1 for 0F1, which comes only after it"),
        ("1F0,1B0", "1B0,1F0", "rank 1 waits at 1B0 for 1F0"),
        ("0B0", "0W0,0I0", "rank 0 waits at 0W0 for 0B0"),
        ("0F0,0F1,0B0", "(0F0;0B0)OVERLAP_F_B,0F1", "rank 0 waits at 0B0 for 0F0"),
    ],
)
def test_files_that_would_fail_later(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert len(read_order(write(tmp_path, GOOD), 2)) == 2
    path = write(tmp_path, GOOD.replace(old, new))
    if not said:
        read_order(path, 2)
        return
    with pytest.raises(ConfigError) as refused:
        read_order(path, 2)
    assert refused.value.key == KEY
    assert said in refused.value.problem
    assert "\n" not in refused.value.problem
    assert refused.value.problem.startswith("own.csv")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.csv: No such file"):
        read_order(str(tmp_path / "none.csv"), 2)
    with pytest.raises(ConfigError, match="is no file"):
        read_order(str(tmp_path), 2)
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"0F0,\xff\xfe")
    with pytest.raises(ConfigError, match="is no CSV file"):
        read_order(str(path), 2)
