"""Quantised checkpoints, seen as the bfloat16 checkpoints that they stand for.

Each weight is bf16(scale * (q - zero)): the difference exact, the product rounded to fp32 (it is
exact for 16-bit scales), then to bfloat16, ties to even. Where the core can hold the integers
themselves, `read_codes` gives them. Activations stay as they are but in a w8a8 model: a scheme that
also quantises them is otherwise run on its weights alone, with a warning.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import LoadError
from .codes import Codes, Grouped, Misfit, stack
from .hf_config import HfConfig
from .source import Entry, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .codes import CodePrecision

__all__ = ["Linear", "Parts", "QuantisedSource", "Scheme", "read_scheme", "to_bfloat16"]

Activations = Literal["int8", "other"] | None

# Values decoded at once: what bounds the memory that reading takes beside its result.
_SLAB = 1 << 22


@dataclass(frozen=True)
class Linear:
    """A linear layer's weight [out, in]; `rows(start, stop)` decodes some of it.

    `precision` names the core's kind of integers that it comes closest to, None for float8.
    """

    shape: tuple[int, int]
    rows: Callable[[int, int], Grouped]
    precision: CodePrecision | None


class Parts:
    """The stored tensors of one quantised layer; remembers which of them were taken."""

    def __init__(self, source: Source, module: str) -> None:
        self.module = module
        self.taken: set[str] = set()
        self._source = source

    def has(self, part: str) -> bool:
        return f"{self.module}.{part}" in self._source.entries

    def entry(self, part: str, dtypes: Collection[str], shape: tuple[int, ...] | None) -> Entry:
        """Take a part. Raises LoadError where it is missing or has another dtype or shape."""
        name = f"{self.module}.{part}"
        if name not in self._source.entries:
            raise LoadError(f"[{self.module}] missing {name} beside its quantised weight")
        entry = self._source.entries[name]
        if entry.dtype not in dtypes:
            raise LoadError(f"[{name}] expected {' or '.join(dtypes)}, got {entry.dtype}")
        if shape is not None and entry.shape != shape:
            raise LoadError(f"[{name}] expected shape {list(shape)}, got {list(entry.shape)}")
        self.taken.add(name)
        return entry

    def skip(self, *parts: str) -> None:
        """Take parts that only matter where activations are quantised too, if they are there."""
        self.taken |= {f"{self.module}.{part}" for part in parts if self.has(part)}

    def read(self, part: str) -> NDArray[Any]:
        return self._source.read(f"{self.module}.{part}")


class Scheme(ABC):
    """One way to store linear layers, as a quantization_config describes it."""

    kept: tuple[str, ...] = ()
    """Layers that the config says are not quantised: parts of names, or re: and a pattern."""
    activations: Activations = None
    """How activations are quantised: "int8" is a scale for each token, found as it runs."""

    @abstractmethod
    def module_of(self, name: str, entry: Entry) -> str | None:
        """The layer that a stored tensor is the quantised weight of, None where it is none."""

    @abstractmethod
    def open(self, parts: Parts) -> Linear:
        """A layer's weight, everything checked that headers tell. Raises LoadError."""


class QuantisedSource(Source):
    """A source with each quantised layer's parts in place of its weight."""

    def __init__(self, source: Source, scheme: Scheme) -> None:
        """Closes `source` and raises LoadError for a layer whose parts do not fit each other."""
        self._source = source
        self._linears: dict[str, Linear] = {}
        self._warned = False
        try:
            self._open(scheme)
        except Exception:
            source.close()
            raise

    def _open(self, scheme: Scheme) -> None:
        stored = self._source.entries
        self.entries = dict(stored)
        useless = set()
        for name, entry in stored.items():
            module = scheme.module_of(name, entry)
            if module is None:
                continue
            pattern = _matching(module, scheme.kept)
            if pattern is not None:
                raise LoadError(
                    f"[{name}] expected an unquantised weight, since the quantization_config "
                    f"leaves out {pattern!r}, got {entry.dtype}"
                )
            parts = Parts(self._source, module)
            linear = scheme.open(parts)
            for part in parts.taken:
                del self.entries[part]
            weight = f"{module}.weight"
            if weight in self.entries:
                raise LoadError(f"[{weight}] expected this or {name}, got both")
            self.entries[weight] = Entry("bfloat16", linear.shape)
            self._linears[weight] = linear
            # Some tools give every layer a bias, zero where the model has none.
            bias = f"{module}.bias"
            loadable = bias in stored and stored[bias].dtype in self._source.loadable
            if loadable and not self._source.read(bias).any():
                useless.add(bias)
        self.useless = frozenset(useless)
        if not self._linears:
            raise LoadError("[quantization_config] expected quantised weights, got none")

    def read(self, name: str) -> NDArray[Any]:
        if name in self._linears:
            return self.read_rows(name, 0, self._linears[name].shape[0])
        return self._source.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        if name not in self._linears:
            return self._source.read_rows(name, start, stop)
        linear = self._linears[name]
        bits = np.empty((stop - start, linear.shape[1]), np.uint16)
        for begin, end in _slabs(start, stop, linear.shape[1]):
            bits[begin - start : end - start] = to_bfloat16(linear.rows(begin, end).floats())
        return bits

    def read_codes(
        self, name: str, precision: CodePrecision, start: int, stop: int
    ) -> Codes | None:
        linear = self._linears.get(name)
        if linear is None or linear.precision != precision:
            return None
        try:
            slabs = _slabs(start, stop, linear.shape[1])
            return stack([linear.rows(*slab).codes(precision) for slab in slabs])
        except Misfit as reason:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{name}: the checkpoint's own {precision} cannot be kept, since {reason}; "
                    "this weight and others like it are dequantised and rounded again",
                    stacklevel=2,
                )
            return None

    def close(self) -> None:
        self._source.close()


def _slabs(start: int, stop: int, columns: int) -> list[tuple[int, int]]:
    """Rows [start, stop) in pieces of about `_SLAB` values."""
    step = max(_SLAB // columns // 8 * 8, 8)
    return [(begin, min(begin + step, stop)) for begin in range(start, stop, step)]


def _matching(module: str, patterns: Collection[str]) -> str | None:
    """The first pattern that a layer's name fits: whole parts of it, or re: and what it starts."""
    for one in patterns:
        if one.startswith("re:"):
            if re.match(one[3:], module):
                return one
        elif f".{one}." in f".{module}.":
            return one
    return None


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def read_scheme(
    raw: Mapping[str, Any], dtype: str = "bfloat16", where: str = "config.json"
) -> Scheme | None:
    """The scheme that a config's quantization_config names, None where it has none.

    Warns where a model of `dtype` treats activations in another way than the checkpoint says.
    Raises LoadError, naming the method and the key, for whatever cannot be decoded here.
    """
    from .quant_floats import compressed_tensors, fp8
    from .quant_ints import awq, gptq

    config = raw.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise LoadError(f"[{where} quantization_config] expected an object, got {config!r}")
    readers: dict[Any, Callable[[QuantConfig], Scheme]] = {
        "gptq": gptq,
        "awq": awq,
        "fp8": fp8,
        "compressed-tensors": compressed_tensors,
    }
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise LoadError(
            f"[{where} quantization_config] expected quant_method {', '.join(readers)}, "
            f"got {method!r}: this kind of quantised checkpoint is not supported"
        )
    reader = QuantConfig(config, f"{where} quantization_config {method}")
    scheme = readers[method](reader)
    reader.refuse_rest()
    if scheme.activations is not None and (scheme.activations, dtype) != ("int8", "w8a8"):
        how = "not quantised here, only the weights are"
        if dtype == "w8a8":
            how = "quantised to int8 here with a scale for each token, not as the config says"
        warnings.warn(f"{reader.where}: activations are {how}", stacklevel=2)
    return scheme


class QuantConfig(HfConfig):
    """A quantization_config. Here a key that nobody asked for is refused, whatever its name."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self.unused("quant_method")

    def names(self, *keys: str) -> tuple[str, ...]:
        """The first of these keys that has a list of names; () where none has."""
        self.unused(*keys)
        for key in keys:
            value = self.raw.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise LoadError(f"[{self.where} {key}] expected a list of names, got {value!r}")
            return tuple(value)
        return ()

    def inner(self, key: str) -> QuantConfig:
        """An object within; it has to be there."""
        value = self.mapping(key)
        if not value:
            raise LoadError(f"[{self.where}] expected an object for {key!r}, got none")
        return QuantConfig(value, f"{self.where} {key}")

    def refuse_rest(self) -> None:
        """Raise LoadError for the first key that was not asked for and says something."""
        for key, value in self.raw.items():
            if key not in self._seen and value not in (None, False, "", [], {}):
                raise LoadError(f"[{self.where}] {key!r} is not supported here, got {value!r}")
