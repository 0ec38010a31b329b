"""The GGUF container: metadata, tensor headers, and dequantised tensors.

The header is parsed here, with every length checked against the file, because the gguf package's
own reader takes seconds over a vocabulary of a hundred thousand tokens. What the quantised types
mean is left to that package.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .codes import Codes, fits_half
from .source import Entry, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .codes import CodePrecision

__all__ = ["GgufFile"]

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads a header front to back, never past its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, length: int) -> memoryview:
        end = self.position + length
        if end > len(self._data):
            raise LoadError(f"ends at byte {len(self._data)}, in the middle of its header")
        part = self._data[self.position : end]
        self.position = end
        return part

    def number(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def text(self) -> str:
        # Token lists hold pieces of characters in some files; they must survive unchanged.
        return str(self.take(self.number("<Q")), "utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind == _ARRAY and depth < 4:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner])
                return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
            return [self.value(inner, depth + 1) for _ in range(count)]
        raise LoadError(f"holds a metadata value of unknown type {kind}")


class GgufFile(Source):
    """A memory-mapped GGUF file, version 2 or 3, little-endian."""

    metadata: dict[str, Any]

    def __init__(self, path: Path) -> None:
        """Raises LoadError for a damaged, truncated, split or big-endian file."""
        self._name = path.name
        self._map: NDArray[np.uint8] | None = None
        self.metadata = {}
        self.entries = {}
        self._places: dict[str, tuple[int, int, int]] = {}
        try:
            self._map = np.memmap(path, mode="r", dtype=np.uint8)
            self._parse(_Cursor(np.asarray(self._map).data))
        except LoadError as error:
            raise LoadError(f"[{path.name}] damaged GGUF file: it {error}") from error
        except (OSError, ValueError) as error:
            raise LoadError(f"[{path.name}] cannot be read as GGUF: {error}") from error
        if self.metadata.get("split.count", 0) > 1:
            raise LoadError(
                f"[{path.name}] is one of {self.metadata['split.count']} parts: merge them first "
                "(llama-gguf-split --merge)"
            )
        self.loadable = _loadable({entry.dtype for entry in self.entries.values()})

    def _parse(self, cursor: _Cursor) -> None:
        if bytes(cursor.take(4)) != b"GGUF":
            raise LoadError("does not begin with GGUF")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise LoadError(f"has version {version}: only 2 and 3, little-endian, can be read")
        num_tensors, num_values = cursor.number("<Q"), cursor.number("<Q")
        for _ in range(num_values):
            key = cursor.text()
            if key in self.metadata:
                raise LoadError(f"holds {key} twice")
            self.metadata[key] = cursor.value(cursor.number("<I"))
        headers = []
        for _ in range(num_tensors):
            name, dimensions = cursor.text(), cursor.number("<I")
            shape = tuple(cursor.number("<Q") for _ in range(min(dimensions, 5)))
            headers.append((name, shape[::-1], cursor.number("<I"), cursor.number("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise LoadError(f"has an alignment of {alignment}")
        start = -(-cursor.position // alignment) * alignment
        for header in headers:
            self._place(start, *header)

    def _place(self, start: int, name: str, shape: tuple[int, ...], kind: int, at: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        assert self._map is not None
        if name in self.entries:
            raise LoadError(f"holds tensor {name} twice")
        if not 1 <= len(shape) <= 4:
            raise LoadError(f"gives tensor {name} {len(shape)} dimensions")
        try:
            dtype = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[dtype]
        except (ValueError, KeyError):
            raise LoadError(f"gives tensor {name} the unknown type {kind}") from None
        if shape[-1] % block:
            raise LoadError(f"gives tensor {name} rows that are not whole {dtype.name} blocks")
        length = shape[-1] // block * size
        for extent in shape[:-1]:
            length *= extent
        if start + at + length > len(self._map):
            raise LoadError(f"ends at byte {len(self._map)}, in the middle of tensor {name}")
        self.entries[name] = Entry(_DTYPES.get(dtype.name, dtype.name), shape)
        self._places[name] = (start + at, length, kind)

    def read(self, name: str) -> NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        if self._map is None:
            raise LoadError(f"[{self._name}] is closed")
        begin, length, kind = self._places[name]
        dtype, shape = GGMLQuantizationType(kind), self.entries[name].shape
        raw = np.asarray(self._map)[begin : begin + length]
        # Stored bytes may begin anywhere; typed views must not.
        plain = {"F32": np.float32, "F16": np.float16}.get(dtype.name)
        if plain is not None:
            raw = raw.copy() if begin % 4 else raw
            return raw.view(plain).reshape(shape).astype(np.float32, copy=False)
        rows = raw.reshape(quant_shape_to_byte_shape(shape, dtype))
        values: NDArray[np.float32] = dequantize(rows, dtype).reshape(shape)
        return values.astype(np.float32, copy=False)

    def read_codes(
        self, name: str, precision: CodePrecision, start: int, stop: int
    ) -> Codes | None:
        """Q4_0 and Q4_1 are the core's int4. Q8_0 has a scale every 32 inputs, so it is no int8."""
        entry = self.entries[name]
        headers = {"Q4_0": 1, "Q4_1": 2}.get(entry.dtype)
        if precision != "int4" or headers is None:
            return None
        if self._map is None:
            raise LoadError(f"[{self._name}] is closed")
        begin, length, _ = self._places[name]
        raw = np.asarray(self._map)[begin : begin + length]
        blocks = raw.reshape(entry.shape[0], -1, 2 * headers + 16)[start:stop]
        halves = np.ascontiguousarray(blocks[..., : 2 * headers]).view("<f2").astype(np.float32)
        if not fits_half(halves):
            return None
        # The low nibbles of a block are its first 16 values, the high ones the others.
        nibbles = blocks[..., 2 * headers :]
        values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).view(np.int8)
        scales = np.ascontiguousarray(halves[..., 0])
        return Codes(
            "int4",
            values.reshape(stop - start, -1),
            scales,
            np.full_like(scales, -8) if headers == 1 else np.ascontiguousarray(halves[..., 1]),
            zero_points=headers == 1,
        )

    def close(self) -> None:
        self._map = None


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _loadable(dtypes: set[str]) -> frozenset[str]:
    """Those of a file's dtypes that the installed gguf package can dequantise."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    able = {"float32", "float16"}
    for name in dtypes - able:
        kind = GGMLQuantizationType["BF16" if name == "bfloat16" else name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        able.add(name)
    return frozenset(able)
