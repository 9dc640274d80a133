"""The Hugging Face twin of a family, as data: which of their tensors hold ours and in what form, and which keys of a
``config.json`` hold our hyper-parameters.

No family stands here and no file is read; what is done with the data is in ``huggingface.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

REQUIRED: Any = object()
"""The default of a key that must be there."""


class Form(Protocol):
    """How a tensor lies in their files: two inverse maps that change no number."""

    def store(self, tensor: Tensor) -> Tensor:
        """Ours → theirs."""

    def load(self, tensor: Tensor) -> Tensor:
        """Theirs → ours."""


@dataclass(frozen=True)
class AsItIs:
    """The same here and there."""

    def store(self, tensor: Tensor) -> Tensor:
        return tensor

    def load(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True)
class Transposed:
    """A linear map that is stored ``[in, out]``; a vector stays as it is."""

    def store(self, tensor: Tensor) -> Tensor:
        return tensor.T if tensor.dim() == 2 else tensor

    def load(self, tensor: Tensor) -> Tensor:
        return self.store(tensor)


@dataclass(frozen=True)
class RotaryHalves:
    """Rows of heads whose rotary pairs are (2i, 2i + 1) here and (i, i + head_dim / 2) there."""

    head_dim: int

    def store(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    def load(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Stored:
    """What a tensor of theirs holds: ``parts`` of ours, one after another along the first dimension, in ``form``.

    A star in a name stands for the name of a block.
    """

    parts: Sequence[str]
    form: Form = AsItIs()


@dataclass(frozen=True)
class Key:
    """A key of a ``config.json``: the ``field`` of ours that it fills, what of ours it is ``written_from`` where that
    is not the field, the ``default`` that transformers has where the key is missing, and, where values are words,
    what each of theirs is called here (the first of several that mean the same is the one written)."""

    field: str
    default: Any = REQUIRED
    written_from: str = ""
    words: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Twin:
    """A family as the Hugging Face library has it.

    ``tensors(args)`` tells of each tensor of theirs what it holds. Of ``fixed`` keys the family computes by one value
    only; ``written`` are those that change no number and that their library wants. ``rotary`` adds theta and scaling,
    in both of their spellings. Tensors named by ``ignored`` hold nothing that is learned, ``prefix`` may be missing
    from all names, and probabilities of ``dropout`` are not applied.
    """

    model_type: str
    architecture: str
    tensors: Callable[[Any], Mapping[str, Stored]]
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)
    rotary: bool = False
    ignored: Sequence[str] = ()
    prefix: str = ""
    dropout: Sequence[str] = ()
