"""DATASETS: where documents come from, as text or as tokens, in a fixed order and in pieces that can be read apart.

One module a kind of data set. Finding and cutting files (files.py), tokenising (tokens/) and the order of training rows
(rows/) do not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchtitan.data.files import KEY, TextFile, line_number
from torchtitan.errors import ConfigError
from torchtitan.registry import Registry

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from torchtitan.data.tokens.store import Tokens

OnBadRecord = Literal["raise", "skip"]


@dataclass(frozen=True)
class Passage:
    """A part of a document too long to be handled in one; a whole document is a plain ``str``."""

    text: str
    opens: bool
    closes: bool


@dataclass(frozen=True)
class Skipped:
    """A record that could not be read, and why: counted and told, never passed over in silence."""

    problem: str
    file: TextFile | None = None
    offset: int | None = None
    """Byte of the text in ``file``, None where the problem says the place itself."""

    def __str__(self) -> str:
        # Lines are counted only when somebody reads the message, for it takes reading the file again.
        if self.file is None:
            return self.problem
        if self.offset is None:
            return f"{self.file.path}: {self.problem}"
        return f"{self.file.path}:{line_number(self.file, self.offset)}: {self.problem}"


def refused(bad: object) -> ConfigError:
    """What is raised for a bad record, or a file of them, where they are not to be skipped."""
    return ConfigError(KEY, f"{bad}; mend it, or set data.on_bad_record = skip")


class TextSource(Protocol):
    """What a registered builder ``(path, on_bad_record, *, options)`` returns.

    Building one looks at names and sizes only, and refuses what is not there with a ConfigError.
    """

    name: str
    description: str

    @property
    def fingerprint(self) -> str:
        """Equal only where the documents are; cheap: names, sizes, times, and of the content a sample."""
        ...

    @property
    def num_pieces(self) -> int:
        """Fixed by the data alone. Pieces of a few MB let several processes share the work of reading."""
        ...

    def read(self, piece: int) -> Iterator[str | Passage | Skipped]:
        """Documents of piece 0 <= ``piece`` < ``num_pieces``, always the same; all pieces in order are the data."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a stream stands: after so many records. ``state`` is JSON from which its library goes on there; None: it
    counts them again."""

    records: int = 0
    state: Any = None


class Interrupted(Exception):
    """A stream broke off, as networks do: it may be read again from an earlier place."""


class StreamSource(Protocol):
    """What a builder returns whose documents come one after the other only, nobody knows how many."""

    name: str
    description: str
    fingerprint: str
    """Equal only where the documents are."""
    documents_at_once: int
    """How many of them are tokenised before their place is written down."""
    shuffle_rows: int
    """Rows of a block: the order of training rows is shuffled within blocks, for the whole is not there."""

    def read_from(self, place: Place) -> Iterator[tuple[list[str | Skipped], Place]]:
        """The documents after ``place``, some at a time, and the place after them; always the same ones.

        Raises Interrupted, and ConfigError for what will not mend itself.
        """
        ...


class TokenSource(Protocol):
    """What a builder returns instead whose data are tokens already: no tokenizer is asked, BOS and EOS are as they lie.

    Building one looks at names, sizes and headers only.
    """

    name: str
    description: str

    order_options: Mapping[str, Any]
    """Options given that mean something for ``data.order = "source"`` only."""

    def open(self, vocab_size: int) -> Tokens:
        """The tokens, mapped into memory; ConfigError where files are damaged or do not belong together.

        An id of ``vocab_size`` or more, or below 0, is a ConfigError when a window holds it.
        """
        ...


AnySource = TextSource | StreamSource | TokenSource


def is_tokens(source: AnySource) -> TypeIs[TokenSource]:
    """By what it can do, for a protocol would ask for its fingerprint, which some work out of all the data."""
    return hasattr(source, "open")


def is_stream(source: AnySource) -> TypeIs[StreamSource]:
    return hasattr(source, "read_from")


def check_source(source: Any, name: str) -> None:
    """ConfigError where what builds the data set ``name`` has given what is none of the three."""
    for kind, protocol in (("open", TokenSource), ("read_from", StreamSource), ("read", TextSource)):
        if hasattr(source, kind):
            own = {*dir(source), *getattr(source, "__dict__", ())}
            if lacking := sorted(_members(protocol) - own):
                raise ConfigError(
                    "training.dataset", f"what builds {name} returned a {protocol.__name__} without {lacking[0]}"
                )
            return
    raise ConfigError(
        "training.dataset", f"what builds {name} must return a TextSource, StreamSource or TokenSource, not {source!r}"
    )


def _members(protocol: Any) -> set[str]:
    """Names that ``protocol`` asks for."""
    return {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}


DATASETS: Registry[Any] = Registry("dataset", home=__name__, receives=("path", "on_bad_record"))


def source_builder(
    dataset: str, options: Mapping[str, Any], on_bad_record: OnBadRecord, *, key: str
) -> Callable[[str | None], AnySource]:
    """What builds the data set of that name from its path; ConfigError if there is none, or for ``options``, which
    stand under ``key``, and when it builds, where it cannot or gives what is no data set."""
    bound = DATASETS.bind(dataset, options, key=key)

    def build(path: str | None) -> AnySource:
        source: AnySource = bound(path, on_bad_record=on_bad_record)
        check_source(source, dataset)
        return source

    return build


def needed(path: str | None, name: str) -> str:
    """``path``; ConfigError where there is none, or an empty one, which would mean the working directory."""
    if not path:
        raise ConfigError(KEY, f"the dataset {name} needs a file, a folder or a glob here")
    return path
