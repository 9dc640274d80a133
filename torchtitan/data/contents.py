"""What files hold, in a hash of few reads: what tells one from another of the same name, size and time.

What a file is to be compared with, and what becomes of one that is another, does not belong here.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WHOLE_BYTES = 1 << 28
"""Files up to this size are compared by all that they hold, which takes a fraction of a second."""
_BLOCK_BYTES = 1 << 12
_READS, _BLOCKS_OF_A_FILE = 4096, 64
_READ_AT_ONCE = 16


def sampled_hash(path: Path, blocks: int) -> str:
    """Hash of a file's size and of ``blocks`` pieces of it at equal distances: of terabytes in the time of a few reads.

    Neither name nor times are in it, so that a moved or copied file is the same.
    """
    size = path.stat().st_size
    hasher = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= blocks * _BLOCK_BYTES:
            hasher.update(file.read())
        else:
            for block in range(blocks):
                file.seek(block * (size - _BLOCK_BYTES) // (blocks - 1))
                hasher.update(file.read(_BLOCK_BYTES))
    return hasher.hexdigest()


def content_hash(path: Path) -> str:
    """Hash of a whole file, by what most processors have instructions for; of one beyond 256 MiB of a sample."""
    size = path.stat().st_size
    if size > WHOLE_BYTES:
        return sampled_hash(path, 4096)
    if size == 0:
        return hashlib.sha256().hexdigest()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def sampled_together(paths: Sequence[Path]) -> str:
    """Hash of samples of ``paths``, in their order, in no more than 4096 reads of 4 KiB, sixteen at once.

    Up to 64 files are sampled at 64 places each, more at fewer, 2048 at their beginnings and ends; of more than that
    every so manieth is looked at. OSError where one cannot be read.
    """
    step = max(1, -(-2 * len(paths) // _READS))
    looked_at = paths[::step]
    blocks = max(2, min(_BLOCKS_OF_A_FILE, _READS // max(len(looked_at), 1)))
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        found = list(pool.map(lambda path: sampled_hash(path, blocks), looked_at))
    return hashlib.sha256(repr(found).encode()).hexdigest()
