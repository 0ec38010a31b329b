"""Tensors that torch holds: pickled checkpoints and models in memory.

The only part of loading that needs torch; it is imported when the first one is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError, UnsupportedError
from .source import Entry, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StateSource", "read_pickles"]


def _torch(what: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            f"[{what}] reading this needs torch: `pip install torch`, or convert the checkpoint "
            "to safetensors"
        ) from error
    return torch


class StateSource(Source):
    """A state dict, in memory or mapped."""

    def __init__(self, state: Mapping[str, Any], label: str) -> None:
        """Raises LoadError for an entry that is not a plain tensor with data."""
        torch = _torch(label)
        self._state = dict(state)
        self.entries = {}
        for name, tensor in self._state.items():
            if not isinstance(tensor, torch.Tensor):
                raise LoadError(f"[{label}] {name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.device.type == "meta" or tensor.layout != torch.strided:
                raise LoadError(
                    f"[{label}] {name}: expected a dense tensor with data, "
                    f"got one on {tensor.device} with layout {tensor.layout}"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.entries[name] = Entry(dtype, tuple(tensor.shape))

    def read(self, name: str) -> NDArray[Any]:
        torch = _torch(name)
        if name not in self._state:
            raise LoadError(f"[{name}] the checkpoint is closed")
        tensor = self._state[name].detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            bits: NDArray[Any] = tensor.view(torch.int16).numpy().view(np.uint16)
            return bits
        values: NDArray[Any] = tensor.to(torch.float32).numpy()
        return values

    def close(self) -> None:
        self._state.clear()


def read_pickles(files: list[Path], only: dict[str, str] | None = None) -> StateSource:
    """The state dict of one or more pickled files, mapped and without running any code in them.

    `only` is the index of a sharded checkpoint. Raises LoadError for a damaged file, a tensor that
    is not where the index says, or one that is there twice.
    """
    torch = _torch(files[0].name)
    state: dict[str, Any] = {}
    homes: dict[str, str] = {}
    for file in files:
        try:
            part = _load(torch, file)
        except Exception as error:  # torch raises many kinds for damaged files
            raise LoadError(f"[{file.name}] damaged or unsafe checkpoint: {error}") from error
        if not isinstance(part, Mapping):
            raise LoadError(f"[{file.name}] expected a state dict, got {type(part).__name__}")
        for name, tensor in part.items():
            if name in state:
                raise LoadError(f"[{file.name}] tensor {name} is in another file too")
            state[name], homes[name] = tensor, file.name
    for name, shard in (only or {}).items():
        if homes.get(name) != shard:
            raise LoadError(f"[{shard}] expected tensor {name}, as the index says, got none")
    return StateSource(state, files[0].name)


def _load(torch: Any, file: Path) -> Any:
    import zipfile

    # Only the zip format of torch 1.6 and later can be mapped.
    mapped = zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
