"""Text tokenised once into a token file that all ranks map into memory.

Reading text (datasets/), the format of the file (datatrove.py) and cutting ids into rows (rows/) do not belong here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from torchtitan.config.paths import local_path
from torchtitan.data.contents import WHOLE_BYTES
from torchtitan.data.datasets import StreamSource, TextSource
from torchtitan.data.sharing import make_together
from torchtitan.data.tokens.datatrove import DsWriter, EndedDocuments, index_path
from torchtitan.data.tokens.encode import Encoding, Piece, encode_piece
from torchtitan.data.tokens.store import TokenWriter, circle_window, map_array
from torchtitan.errors import ConfigError
from torchtitan.log import logger
from torchtitan.secrets import hidden

# Raised by who changes what the ids of a given source and tokenizer are, so that old files are not taken for new.
_FORMAT = 3


@dataclass(frozen=True)
class TokenHeader:
    """What is known of a token file without reading it; written last, so that it says the file is whole."""

    format: int
    dtype: str
    tokens: int
    documents: int
    skipped: int
    first_skipped: str
    text_bytes: int
    fingerprint: str
    """Hash of the ids: equal only where two files hold the same tokens in the same order."""
    index_fingerprint: str
    """Hash of the ends of documents."""
    made_from: dict[str, Any]


class TokenFile:
    """Tokens of all documents of a text, in the format of ``datatrove.py``."""

    def __init__(self, path: Path, header: TokenHeader) -> None:
        self.path, self.header = path, header
        self.documents = EndedDocuments(map_array(index_path(path), "<u8"), header.index_fingerprint)
        self._ids = map_array(path, header.dtype)

    def __len__(self) -> int:
        return self.header.tokens

    @property
    def fingerprint(self) -> str:
        return self.header.fingerprint

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        return circle_window(self._ids, start, length)

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path, TokenHeader]]:
        return TokenFile, (self.path, self.header)


def open_tokens(
    source: TextSource, encoding: Encoding, *, cache_folder: str = "", rank: int = 0, ranks: int = 1
) -> TokenFile:
    """The token file of ``source``: from the cache, or made now, together with the other ranks on this file system.

    Needs no process group: ranks find each other in ``cache_folder`` (empty: the user's), and each begins with its own
    share of the text. Raises ConfigError for text that cannot be read, a source without any token, and a folder that
    cannot be used.
    """
    path, recipe = cached_file(source, encoding, cache_folder)
    made_from = {**recipe, "source_name": hidden(source.description), "tokenizer_name": encoding.tokenizer.name}
    started = time.monotonic()
    with kept_in(path.parent, "token files"):
        found = _read_header(path, verify=True)
        if found is None:
            logger.info(f"tokenising {source.name} ({source.description}), once, into {path}")
            # Told more often on a terminal than in a log, and not at all where it is soon done.
            often = 0.5 if sys.stderr.isatty() else 30.0
            with tqdm(
                desc=f"tokenising {source.name}",
                total=source.num_pieces,
                unit="piece",
                disable=rank != 0,
                delay=1,
                mininterval=often,
            ) as bar:
                make_together(
                    path.with_suffix(".work"),
                    source.num_pieces,
                    make=lambda k, part: encode_piece(source, k, encoding).write(part),
                    assemble=lambda parts: _assemble(parts, path, encoding.dtype, made_from),
                    finished=lambda: _read_header(path) is not None,
                    start=rank * source.num_pieces // ranks,
                    progress=lambda done: bar.update(done - bar.n),
                )
        header = found or _read_header(path)
        assert header is not None
        tokens = TokenFile(path, header)
    how = "from" if found else f"tokenised in {time.monotonic() - started:.1f} s into"
    counts = f"{header.tokens:,} tokens of {header.documents:,} documents"
    logger.info(f"{source.name}: {counts} ({source.description}), {how} {path}")
    if header.skipped:
        logger.warning(f"{source.name}: {header.skipped:,} bad records skipped, the first: {header.first_skipped}")
    return tokens


def cached_file(
    source: TextSource | StreamSource, encoding: Encoding, cache_folder: str
) -> tuple[Path, dict[str, Any]]:
    """Where the ids of ``source`` are kept, and all that they depend on."""
    recipe = {"format": _FORMAT, "source": source.fingerprint, **encoding.facts()}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    return cache_path(cache_folder) / f"{source.name}-{digest[:20]}.ds", recipe


@contextlib.contextmanager
def kept_in(folder: Path, what: str, *more: type[Exception]) -> Iterator[None]:
    """Within, an OSError, or one of ``more``, is a ConfigError: ``what`` cannot be kept in ``folder``."""
    errors: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except errors as error:
        raise ConfigError(
            "data.cache_folder", f"cannot keep {what} in {folder} ({error}); name another folder"
        ) from error


def cache_path(cache_folder: str) -> Path:
    """``cache_folder``, or the user's where it is empty; ConfigError where there is no user's."""
    if cache_folder:
        return local_path(cache_folder, "data.cache_folder")
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return local_path(users, "data.cache_folder") / "torchtitan" / "tokens"


def _holds(path: Path, fingerprint: str) -> bool:
    """Whether ``path`` has the content that was written, as far as it is looked at."""
    if path.stat().st_size > WHOLE_BYTES:
        return True
    return hashlib.blake2b(map_array(path, "u1").data, digest_size=16).hexdigest() == fingerprint


def _read_header(path: Path, *, verify: bool = False) -> TokenHeader | None:
    """What stands beside the token file at ``path``, None where either is missing or they do not fit together.

    ``verify``: ids and index are read and compared with their hashes, where each is no larger than ``WHOLE_BYTES``.
    """
    try:
        header = TokenHeader(**json.loads(path.with_suffix(".json").read_bytes()))
        expected, size = header.tokens * np.dtype(header.dtype).itemsize, path.stat().st_size
        if size != expected or size == 0:
            problem = f"{size:,} bytes where {expected:,} were written"
        elif index_path(path).stat().st_size != 8 * header.documents:
            problem = "its index is not that of its documents"
        elif verify and not (_holds(path, header.fingerprint) and _holds(index_path(path), header.index_fingerprint)):
            problem = "it was changed after it was written"
            path.with_suffix(".json").unlink(missing_ok=True)  # nobody else may take it for whole
        else:
            return header
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        problem = f"header: {error}"
    if verify:
        logger.warning(f"token file {path} is damaged ({problem}): making it again")
    return None


def _assemble(parts: list[Path], path: Path, dtype: str, made_from: dict[str, Any]) -> None:
    """Write the token file at ``path``, its index, and then, as the sign that all is whole, its header."""
    writer = DsWriter(path, dtype, made_from["tokenizer_name"])
    skipped, text_bytes, first_skipped = add_pieces(parts, writer)
    if writer.tokens == 0:
        writer.discard()
        raise empty(writer.documents, skipped, first_skipped)
    header = TokenHeader(
        format=_FORMAT,
        dtype=dtype,
        tokens=writer.tokens,
        documents=writer.documents,
        skipped=skipped,
        first_skipped=first_skipped,
        text_bytes=text_bytes,
        fingerprint=writer.fingerprint,
        index_fingerprint=writer.index_fingerprint,
        made_from=made_from,
    )
    # The header must not reach the disk before what it vouches for.
    path.with_suffix(".json").unlink(missing_ok=True)
    writer.finish()
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(header), indent=2) + "\n")
    unfinished.rename(path.with_suffix(".json"))


def add_pieces(parts: list[Path], writer: TokenWriter) -> tuple[int, int, str]:
    """Give all pieces to ``writer``; how many records were skipped, bytes of text, and the first that was skipped."""
    skipped = text_bytes = 0
    first_skipped = ""
    for part in parts:
        piece = Piece.read(part)
        skipped += piece.skipped
        text_bytes += piece.text_bytes
        first_skipped = first_skipped or piece.first_skipped
        writer.add(piece.ids, piece.ends)
    return skipped, text_bytes, first_skipped


def empty(documents: int, skipped: int, first_skipped: str) -> ConfigError:
    """What is raised for a data set without any token."""
    lost = f"; {skipped} bad records were skipped, the first: {first_skipped}" if skipped else ""
    return ConfigError("training.dataset_path", f"the data set is empty: no token in {documents} documents{lost}")
