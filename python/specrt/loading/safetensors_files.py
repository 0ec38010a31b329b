"""Safetensors, single or sharded, read through memory maps."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .hf_config import read_json
from .source import Entry, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SafetensorsSource", "shards_of"]

_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "BOOL": "bool",
}
# numpy has no bfloat16 and no float8: their raw bits are handed on as uint16 and uint8.
_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float8_e4m3": np.dtype("u1"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int8": np.dtype("i1"),
    "bool": np.dtype("?"),
}


class SafetensorsSource(Source):
    """Tensors of one or more files. All but fp16 are views of the map: nothing is copied."""

    def __init__(self, files: list[Path], only: dict[str, str] | None = None) -> None:
        """`only` says, for a sharded checkpoint, which tensors are to be in which file.

        Raises LoadError for a file that is missing, damaged or cut short, for a tensor that is not
        where the index says, and for one that is there twice.
        """
        self.entries = {}
        self._places: dict[str, tuple[Path, int, int]] = {}
        self._maps: dict[Path, NDArray[Any]] = {}
        for file in files:
            self._open(file)
        for name, shard in (only or {}).items():
            if name not in self._places or self._places[name][0].name != shard:
                raise LoadError(f"[{shard}] expected tensor {name}, as the index says, got none")

    def _open(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if not file.is_file():
            raise LoadError(f"[{file.name}] no such file in {file.parent}")
        try:
            # The library checks the header: sizes, offsets without gaps, the length of the file.
            with safe_open(file, framework="numpy"):
                pass
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            raise LoadError(f"[{file.name}] damaged safetensors file: {error}") from error
        start = 8 + length
        self._maps[file] = np.memmap(file, mode="r", dtype=np.uint8)
        for name, info in header.items():
            if name == "__metadata__":
                continue
            if name in self.entries:
                raise LoadError(f"[{file.name}] tensor {name} is in another file too")
            self.entries[name] = Entry(
                _DTYPES.get(info["dtype"], info["dtype"]), tuple(info["shape"])
            )
            begin, end = info["data_offsets"]
            self._places[name] = (file, start + begin, start + end)

    def read(self, name: str) -> NDArray[Any]:
        file, begin, end = self._places[name]
        if file not in self._maps:
            raise LoadError(f"[{file.name}] is closed")
        entry = self.entries[name]
        raw = np.asarray(self._maps[file])[begin:end]
        array: NDArray[Any] = raw.view(_NUMPY[entry.dtype]).reshape(entry.shape)
        return array.astype(np.float32) if entry.dtype == "float16" else array

    def close(self) -> None:
        self._maps.clear()


def shards_of(folder: Path, index_name: str) -> dict[str, str]:
    """Tensor name -> file name, out of a sharded checkpoint's index. Raises LoadError.

    Warns of files of the same kind that the index does not name: they are ignored.
    """
    index = read_json(folder / index_name)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"[{index_name}] expected a weight_map, got {weight_map!r}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise LoadError(f"[{index_name}] {name}: expected a file name, got {shard!r}")
    files = set(weight_map.values())
    absent = sorted(one for one in files if not (folder / one).is_file())
    if absent:
        raise LoadError(f"[{index_name}] missing shard: {', '.join(absent)}")
    suffix = Path(next(iter(files))).suffix
    extra = sorted(one.name for one in folder.glob(f"*{suffix}") if one.name not in files)
    if extra:
        warnings.warn(f"{folder}: {', '.join(extra)} not in {index_name}: ignored", stacklevel=2)
    return weight_map
