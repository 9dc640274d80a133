"""The text that every Python carries: language reference, documentation of built-ins, library sources.

Text that a user brings does not belong here (datasets/). Nothing is shipped and nothing is fetched.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Written in C, so that their documentation is in no source file.
_COMPILED = (
    "_thread array atexit binascii builtins cmath errno faulthandler gc io itertools marshal math mmap posix "
    "select signal struct sys time unicodedata zlib"
)
# Documented at length. A list, so that the text stays of one size: it is tokenised within two or three seconds.
_SOURCES = (
    "abc argparse ast base64 bisect calendar cmd code codecs collections configparser contextlib copy csv dataclasses "
    "difflib dis doctest enum fileinput fractions functools getopt gettext glob graphlib gzip hashlib heapq hmac "
    "inspect io ipaddress json linecache locale logging numbers operator optparse os pathlib pdb pickle platform "
    "pprint queue random sched selectors shelve shlex shutil signal socket socketserver statistics string subprocess "
    "tarfile tempfile textwrap threading timeit tokenize trace traceback tracemalloc types typing uuid warnings "
    "weakref zipfile"
)
_PIECE_BYTES = 1 << 18


class PythonDocs:
    """Documents of the running interpreter, the same on every machine with the same build of Python.

    First the topics of ``help()``, which are chapters of the language reference; then what the built-in
    modules say of themselves; then the sources of well-known modules of the standard library.
    """

    name = "python_docs"

    def __init__(self) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        documents = [("topic", name, len(text)) for name, text in sorted(_topics().items())]
        documents += [("module", name, _PIECE_BYTES // 16) for name in _compiled()]
        for name in _SOURCES.split():
            for file in (f"{name}.py", f"{name}/__init__.py"):
                if (library / file).is_file():
                    documents.append(("source", file, (library / file).stat().st_size))
        # This file too, for how it writes the documents down.
        facts = (sys.version, Path(__file__).read_bytes(), documents)
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
        self.description = f"documentation and sources of Python {sys.version.split()[0]}"
        self._library = library
        self._pieces: list[list[tuple[str, str]]] = []
        room = 0
        for kind, name, size in documents:
            if not self._pieces or size > room:
                self._pieces.append([])
                room = _PIECE_BYTES
            self._pieces[-1].append((kind, name))
            room -= size
        self.num_pieces = len(self._pieces)

    def read(self, piece: int) -> Iterator[str]:
        """The documents of one piece, in order."""
        for kind, name in self._pieces[piece]:
            if kind == "topic":
                yield _topics()[name]
            elif kind == "module":
                yield _module_texts()[name]
            else:
                yield importlib.util.decode_source((self._library / name).read_bytes())


def _topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        return {}


def _compiled() -> list[str]:
    return [name for name in _COMPILED.split() if importlib.util.find_spec(name)]


@functools.cache
def _module_texts() -> dict[str, str]:
    """Asked of a fresh interpreter: in this one, somebody may have replaced what was built in, as sys.excepthook."""
    fresh = subprocess.run([sys.executable, "-I", "-S", __file__], check=True, stdout=subprocess.PIPE)
    return json.loads(fresh.stdout)


def _module_text(name: str) -> str:
    """Documentation of a module and of its public functions, classes and methods, each under its signature."""
    module = importlib.import_module(name)
    parts = [f"{name}\n\n{inspect.getdoc(module) or ''}"]
    for symbol, value in sorted(vars(module).items()):
        if symbol.startswith("_") or not (inspect.isbuiltin(value) or inspect.isclass(value)):
            continue
        parts.append(_entry(f"{name}.{symbol}", value))
        if inspect.isclass(value):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_") and (inspect.isroutine(method) or inspect.isdatadescriptor(method)):
                    parts.append(_entry(f"{symbol}.{member}", method))
    return "\n\n".join(parts) + "\n"


def _entry(title: str, value: object) -> str:
    signature = getattr(value, "__text_signature__", None) or ""
    for bound in ("$module, ", "$self, ", "$type, ", "$module", "$self", "$type"):
        signature = signature.replace(bound, "")
    text = inspect.cleandoc(value.__doc__ or "")
    return f"{title}{signature}\n" + "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


if __name__ == "__main__":
    json.dump({name: _module_text(name) for name in _compiled()}, sys.stdout)
