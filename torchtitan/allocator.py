"""Which allocator the processes of a run on a CPU start with, and which one a process has.

Every step asks for the same gigabytes anew, and glibc gives them back to the system in between: the page faults take a
third to a half of a step. Memory of accelerators is torch's own affair.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}
"""What makes glibc keep what is freed: nearly as fast, at the price of memory."""


def usual_places() -> list[Path]:
    """Folders where distributions, conda and hand-built packages put libraries."""
    system = [Path("/usr/local/lib"), Path("/usr/lib64"), Path("/usr/lib")]
    if multiarch := sysconfig.get_config_var("MULTIARCH"):  # Debian's
        system.insert(1, Path("/usr/lib", multiarch))
    return [Path(sys.prefix, "lib"), *system]


def settings(environment: Mapping[str, str], places: Sequence[Path]) -> dict[str, str]:
    """What to add to ``environment``, in which processes on a CPU are started; nothing where the user has chosen.

    tcmalloc if one of ``places`` has it, else glibc's variables.
    """
    if environment.keys() & {"LD_PRELOAD", *KEEPING}:
        return {}
    # Else the loader complains in every process of, say, a library for 32 bits.
    own = _kind_of_machine(Path(sys.executable))
    for place in places:
        for name in _NAMES:
            if own is not None and _kind_of_machine(place / name) == own:
                return {"LD_PRELOAD": str(place / name)}
    return dict(KEEPING)


def _kind_of_machine(file: Path) -> bytes | None:
    """Width, order of bytes and processor in the header of an ELF ``file``; None if it cannot be read or is none."""
    try:
        with file.open("rb") as opened:
            header = opened.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header.startswith(b"\x7fELF") else None


def describe(environment: Mapping[str, str], maps: Path = Path("/proc/self/maps")) -> str:
    """The allocator of this process in a few words, by the libraries that it has loaded."""
    try:
        loaded = re.search(r"/lib(tcmalloc|jemalloc|mimalloc)[^/\n]*$", maps.read_text(), re.MULTILINE)
    except OSError:
        loaded = None
    if loaded is not None:
        return loaded[0][1:]
    advice = "tcmalloc would be faster (apt-get install libtcmalloc-minimal4; conda install gperftools)"
    if environment.keys() >= KEEPING.keys():
        return f"glibc's, which is told to keep what is freed; {advice}"
    return f"the system's; {advice}" if sys.platform == "linux" else "the system's"
