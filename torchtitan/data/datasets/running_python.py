"""The data set that needs nothing but Python.

What its documents are is in python_docs.py.
"""

from __future__ import annotations

from torchtitan.data.datasets import DATASETS, OnBadRecord, TextSource
from torchtitan.data.files import KEY
from torchtitan.data.python_docs import PythonDocs
from torchtitan.errors import ConfigError


@DATASETS.register("python_docs")
def build_python_docs(path: str | None, on_bad_record: OnBadRecord) -> TextSource:
    """English and code of the running Python: its language reference, documentation and library sources."""
    if path is not None:
        raise ConfigError(
            KEY,
            "python_docs reads the running Python and takes no path; files are for training.dataset = text or jsonl",
        )
    return PythonDocs()
