"""The Hugging Face hub and its libraries: which commit a name means, and what goes wrong there in one line.

What a data set is does not belong here. Credentials come from the environment, as the libraries find them.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan.data.files import KEY
from torchtitan.errors import ConfigError, one_line
from torchtitan.log import note_once
from torchtitan.secrets import hide

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROBE_SECONDS = 10
_NETWORKS = {"aiohttp", "fsspec", "http", "httpx", "httpx2", "requests", "ssl", "urllib3"}
_LOST_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, gzip.BadGzipFile)


def find_commit(name: str, revision: str | None) -> str | None:
    """The commit at the hub that ``revision`` means, None where it cannot be asked and was never; one short request."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    for token in (os.environ.get("HF_TOKEN"), huggingface_hub.get_token()):
        hide("huggingface_token", token)
    if constants.HF_HUB_OFFLINE:
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        cached = Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "refs", revision or "main")
        return cached.read_text().strip() if cached.is_file() else None
    hub = huggingface_hub.HfApi()
    try:
        found = hub.dataset_info(name, revision=revision, timeout=_PROBE_SECONDS)
        if found.gated:
            hub.auth_check(name, repo_type="dataset")
    except errors.GatedRepoError:
        raise ConfigError(
            KEY,
            f"{name} is gated: ask for access at {hub.endpoint}/datasets/{name}, and put a token of yours into the "
            "environment as HF_TOKEN",
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError("data.args.revision", f"{name} has no revision {revision!r} at the hub") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ConfigError(
            KEY,
            f"there is no folder {name}, and at the hub no data set of that name that you may read; a private one "
            "needs a token in the environment as HF_TOKEN",
        ) from None
    except Exception as error:  # each of the libraries below has its own
        raise ConfigError(
            KEY,
            f"cannot ask {hub.endpoint} for {name} ({one_line(error)}); with HF_HUB_OFFLINE=1 in the environment what "
            "was downloaded before is used",
        ) from None
    if revision is None:
        note_once(
            f"{name} may change at the hub: this run reads commit {found.sha}; to read that always, "
            f'set data.args.revision = "{found.sha}"'
        )
    return found.sha


@contextlib.contextmanager
def plainly(path: str) -> Iterator[None]:
    """What the library says in a paragraph, as one line."""
    try:
        yield
    except Exception as error:  # it raises of all kinds
        text = cause_of(error)
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in text), "")
        raise ConfigError(KEY, f"{path}: {text}{remedy}") from None


_REMEDIES = {
    "OfflineMode": "; HF_HUB_OFFLINE is set, and it was not downloaded before",
    "script": "; no code of a data set is run here: many have a copy of their data in data.args.revision = "
    '"refs/convert/parquet"',
    "onfig": "; set data.args.config",
    "split": "; set data.args.split",
    "data_files": "; set data.args.data_files",
}


def cause_of(error: BaseException) -> str:
    """One line of the error that the others were raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StopIteration):  # of who asked for the first record
        return "there is no record in it"
    text = one_line(error)
    return text if len(text) <= 300 else f"{text[:299]}…"


def broke_off(error: BaseException) -> bool:
    """Whether ``error`` is one that networks make, and the next try may go without."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if status is not None:
            return status >= 500 or status in (408, 429)
        if isinstance(seen, _LOST_FOR_GOOD):
            return False
        if isinstance(seen, OSError) or type(seen).__module__.partition(".")[0] in _NETWORKS:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
