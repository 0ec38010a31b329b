"""From a target as the user names it to packed weights and a tokenizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import _core
from .errors import InvalidArgumentError, LoadError
from .loading import Checkpoint, open_checkpoint
from .planning import ModelShape, map_saved, shape_of

if TYPE_CHECKING:
    from .text import Tokenizer

T = TypeVar("T")

__all__ = ["Opened", "open_target", "progress", "set_tensor", "tokenizer_of"]


@dataclass
class Opened:
    """A target whose shape is known and whose weights are still to be read."""

    name: str
    shape: ModelShape
    checkpoint: Checkpoint | None
    saved: _core.Model | None
    tokenizer: Tokenizer | None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.shape.config.eos_token_ids)

    @property
    def generation(self) -> Mapping[str, Any]:
        return {} if self.checkpoint is None else self.checkpoint.generation

    def load(self) -> _core.Model:
        """Packed weights; a progress bar on a terminal. Lets go of the checkpoint."""
        if self.saved is not None:
            return self.saved
        assert self.checkpoint is not None
        builder = _core.ModelBuilder(self.shape.config, self.shape.dtype)
        with self.checkpoint as checkpoint:
            for name in progress(checkpoint.names, f"Loading {self.name} as {self.shape.dtype}"):
                try:
                    set_tensor(builder, checkpoint, name)
                except InvalidArgumentError as error:
                    raise LoadError(f"[{checkpoint.name}] {error}") from error
        return builder.build()

    def close(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close()


def open_target(target: Any, *, tokenizer: Any, dtype: str, max_model_len: int | None) -> Opened:
    """Open a checkpoint, or a file that `Engine.save` wrote, and its tokenizer.

    `tokenizer` None takes the checkpoint's own; a saved file has none. Raises as
    `open_checkpoint` does.
    """
    saved = map_saved(target, dtype)
    if saved is not None:
        opened = Opened(
            name=Path(target).name,
            shape=ModelShape(saved.config, saved.dtype),
            checkpoint=None,
            saved=saved,
            tokenizer=None,
        )
    else:
        checkpoint = open_checkpoint(target, dtype=dtype, max_model_len=max_model_len)
        opened = Opened(
            name=Path(checkpoint.name).name,
            shape=shape_of(checkpoint),
            checkpoint=checkpoint,
            saved=None,
            tokenizer=None,
        )
    try:
        opened.tokenizer = tokenizer_of(opened.checkpoint, tokenizer)
    except BaseException:
        opened.close()
        raise
    return opened


def tokenizer_of(checkpoint: Checkpoint | None, given: Any) -> Tokenizer | None:
    """The one that the user names, else the checkpoint's own, if it has one."""
    from .text import Tokenizer

    if isinstance(given, (str, os.PathLike)):
        return Tokenizer.from_pretrained(given)
    if given is not None:
        return Tokenizer(given)
    return None if checkpoint is None else checkpoint.load_tokenizer()


def set_tensor(builder: _core.ModelBuilder, checkpoint: Checkpoint, name: str) -> None:
    """One tensor: its own integers where the model holds such, else its values."""
    precision = builder.precision_of(name)
    codes = checkpoint.codes(name, precision)
    if codes is None:
        tensor = checkpoint.tensor(name)
        builder.set(name, tensor.dtype, tensor.array)
        return
    builder.set_quantised(
        name, precision, codes.codes, codes.scales, codes.minima, zero_points=codes.zero_points
    )


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a bar that moves as they are taken on a terminal."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(
        items,
        description=description,
        console=Console(stderr=True),
        transient=True,
    )
