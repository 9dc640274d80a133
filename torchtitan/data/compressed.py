"""Files as the text in them: plain ones as they lie, compressed ones (gzip, zstandard, xz, bzip2) decompressed.

What the text means does not belong here. A file is what its first bytes say, whatever its name.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

ENDINGS = (".gz", ".zst", ".xz", ".bz2")
"""What compressed files are usually called."""
MAGIC_BYTES = 16
# Small, for what comes out may be a thousand times as large.
_READ_BYTES = 1 << 15


class DamagedError(ValueError):
    """An archive that cannot be read to its end: what is wrong, in words."""


class _Format(NamedTuple):
    name: str
    magic: re.Pattern[bytes]
    decompressor: Callable[[], Any]


def _zstandard() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_FORMATS = (
    _Format("a gzip archive", re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(wbits=31)),
    # Parallel compressors begin with a frame to be skipped.
    _Format("a zstandard archive", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", re.DOTALL), _zstandard),
    _Format("an xz archive", re.compile(rb"\xfd7zXZ\x00"), lzma.LZMADecompressor),
    _Format("a bzip2 archive", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.BZ2Decompressor),
)


def compression(head: bytes) -> str | None:
    """What a file is that begins with ``head`` (``MAGIC_BYTES`` of it), None where that is no compressed one."""
    found = _format(head)
    return found.name if found else None


def _format(head: bytes) -> _Format | None:
    return next((form for form in _FORMATS if form.magic.match(head)), None)


def open_text(path: Path) -> BinaryIO:
    """The bytes of the text in ``path``; reading raises DamagedError where an archive is damaged or ends too early.

    What stands before the damage is read first.
    """
    file = open(path, "rb")  # noqa: SIM115
    try:
        found = _format(file.read(MAGIC_BYTES))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    if found is None:
        return file
    return cast(BinaryIO, io.BufferedReader(_Decompressed(file, found), 1 << 20))


def is_decompressed(stream: BinaryIO) -> bool:
    """Whether ``stream``, from ``open_text``, is of a compressed file: its bytes are counted in the text."""
    return isinstance(getattr(stream, "raw", None), _Decompressed)


class _Decompressed(io.RawIOBase):
    """What is compressed in ``file``: any number of archives one after the other, as ``cat`` joins them."""

    def __init__(self, file: BinaryIO, form: _Format) -> None:
        self._file, self._form = file, form
        self._decompressor = form.decompressor()
        self._begun = True  # inside an archive: the first one, for its magic was seen
        self._text = memoryview(b"")
        self._problem: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            if self._problem is not None:
                raise DamagedError(self._problem)
            compressed = self._file.read(_READ_BYTES)
            if not compressed:
                if not self._begun:
                    return 0
                self._problem = f"{self._form.name} that ends before its end: it is truncated"
                continue
            try:
                self._text = memoryview(self._decompress(compressed))
            except Exception as error:  # each of the libraries has its own
                at = self._file.tell() - len(compressed)
                self._problem = f"{self._form.name} that is damaged after byte {at:,} ({error})"
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        parts: list[bytes] = []
        while compressed:
            if not self._begun:
                compressed = compressed.lstrip(b"\x00")  # padding
                if not compressed:
                    break
                self._decompressor, self._begun = self._form.decompressor(), True
            try:
                parts.append(self._decompressor.decompress(compressed))
            except Exception:
                if not any(parts):
                    raise
                # What was whole comes first; what is wrong is met again, with nothing before it.
                self._file.seek(-len(compressed), io.SEEK_CUR)
                self._begun = False
                break
            if not self._decompressor.eof:
                break
            compressed, self._begun = self._decompressor.unused_data, False
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
        super().close()
