"""float8 weights, and compressed-tensors' schemes: float8, int8 and packed integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .codes import Grouped
from .quant_ints import SCALES, unpack
from .quantised import Activations, Linear, Parts, QuantConfig, Scheme
from .source import Entry, as_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["compressed_tensors", "fp8"]


def _float8_table() -> NDArray[np.float32]:
    """The value of each byte as e4m3fn: no infinities, NaN where all other bits are set."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value[(bits & 127) == 127] = np.nan
    return np.where(bits & 128, -value, value).astype(np.float32)


_FLOAT8 = _float8_table()
# Scales and zero points of activations.
_OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "activation_scale",
)  # fmt: skip


@dataclass(frozen=True)
class _Scales:
    """Which values share a scale: `block` rows and columns of them, 0 meaning all there are."""

    block: tuple[int, int]

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        height, width = self.block
        return -(-rows // (height or rows)), -(-columns // (width or columns))

    def group(self, columns: int) -> NDArray[Any]:
        """Each column's group."""
        return np.arange(columns) // (self.block[1] or columns)

    def take(self, scales: NDArray[Any], start: int, stop: int, rows: int) -> NDArray[Any]:
        """One row of scales for each of the rows [start, stop)."""
        return scales[np.arange(start, stop) // (self.block[0] or rows)]


_WHOLE, _CHANNEL = _Scales((0, 0)), _Scales((1, 0))


def _scale_part(parts: Parts, names: tuple[str, ...], wanted: tuple[int, int]) -> str:
    """The name of a layer's scale, checked: dimensions of one may be left out at the end."""
    name = next((one for one in names if parts.has(one)), names[0])
    entry = parts.entry(name, SCALES, None)
    forms: set[tuple[int, ...]] = {wanted, wanted[:1]} if wanted[1] == 1 else {wanted}
    if wanted == (1, 1):
        forms.add(())
    if entry.shape not in forms:
        raise LoadError(
            f"[{parts.module}.{name}] expected shape {list(wanted)}, got {list(entry.shape)}"
        )
    return name


def _plain(parts: Parts, dtype: str, names: tuple[str, ...], scales: _Scales) -> Linear:
    """weight [out, in] of one byte each, its scales, and zero points where there are any."""
    shape = parts.entry("weight", (dtype,), None).shape
    if len(shape) != 2:
        raise LoadError(f"[{parts.module}.weight] expected two dimensions, got {list(shape)}")
    rows, columns = shape
    wanted = scales.shape(rows, columns)
    scale = _scale_part(parts, names, wanted)
    zero = None
    if dtype == "int8" and parts.has("weight_zero_point"):
        zero = "weight_zero_point"
        if parts.entry(zero, ("int8",), None).shape not in (wanted, wanted[:1], ()):
            raise LoadError(f"[{parts.module}.{zero}] expected shape {list(wanted)}")
    elif dtype != "int8":
        parts.skip("weight_zero_point")  # float8 has none; some files hold zeros
    parts.skip(*_OF_ACTIVATIONS)

    def decode(start: int, stop: int) -> Grouped:
        stored = parts.read("weight")[start:stop]
        values = _FLOAT8[stored] if dtype == "float8_e4m3" else stored
        factors = as_float32(parts.read(scale)).reshape(wanted)
        zeros = np.zeros(wanted, np.int8) if zero is None else parts.read(zero).reshape(wanted)
        return Grouped(
            values,
            scales.take(factors, start, stop, rows),
            scales.take(zeros, start, stop, rows),
            scales.group(columns),
        )

    return Linear((rows, columns), decode, "int8" if dtype == "int8" else None)


@dataclass(frozen=True)
class _Fp8(Scheme):
    scales: _Scales
    kept: tuple[str, ...] = ()
    activations: Activations = "other"

    def module_of(self, name: str, entry: Entry) -> str | None:
        return name.removesuffix(".weight") if entry.dtype == "float8_e4m3" else None

    def open(self, parts: Parts) -> Linear:
        names = ("weight_scale_inv", "weight_scale")
        if self.scales == _WHOLE and not parts.has(names[0]) and parts.has(names[1]):
            # Without blocks, one scale for a matrix or one for each of its rows.
            shape = parts.entry(names[1], SCALES, None).shape
            if shape not in ((), (1,), (1, 1)):
                return _plain(parts, "float8_e4m3", names[1:], _CHANNEL)
        return _plain(parts, "float8_e4m3", names, self.scales)


def fp8(config: QuantConfig) -> Scheme:
    """DeepSeek's and Qwen's float8 with a scale for each block, or one for each matrix."""
    config.only("fmt", "e4m3")
    config.only("scale_fmt", "float", "ue8m0")  # of activations; stored scales have to be floats
    config.only("expert_dtype", "fp8")
    config.only("activation_scheme", "dynamic", "static")
    config.unused("dequantize")
    kept = config.names("modules_to_not_convert", "ignored_layers")
    block = config.raw.get("weight_block_size")
    config.unused("weight_block_size")
    return _Fp8(_WHOLE if block is None else _Scales(_block(config, block)), kept)


def _block(config: QuantConfig, value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in value)
    ):
        raise LoadError(f"[{config.where}] expected a block of two whole numbers, got {value!r}")
    return value[0], value[1]


@dataclass(frozen=True)
class _Compressed(Scheme):
    dtype: str
    """float8_e4m3 or int8, "" for packed words."""
    bits: int
    scales: _Scales
    symmetric: bool
    kept: tuple[str, ...] = ()
    activations: Activations = None

    def module_of(self, name: str, entry: Entry) -> str | None:
        if self.dtype:
            return name.removesuffix(".weight") if entry.dtype == self.dtype and name.endswith(
                ".weight"
            ) else None  # fmt: skip
        return name.removesuffix(".weight_packed") if name.endswith(".weight_packed") else None

    def open(self, parts: Parts) -> Linear:
        if not self.dtype:
            return self._packed(parts)
        if not self.symmetric and not parts.has("weight_zero_point"):
            raise LoadError(f"[{parts.module}] missing {parts.module}.weight_zero_point")
        return _plain(parts, self.dtype, ("weight_scale",), self.scales)

    def _packed(self, parts: Parts) -> Linear:
        """weight_packed [out, in * bits / 32] with words along inputs, offset by half the range;
        weight_zero_point, where not symmetric, packed along outputs."""
        each, half = 32 // self.bits, 1 << (self.bits - 1)
        words = parts.entry("weight_packed", ("int32",), None).shape
        parts.entry("weight_shape", ("int64", "int32"), (2,))
        rows, columns = (int(one) for one in parts.read("weight_shape"))
        if words != (rows, -(-columns // each)) or columns < 1:
            raise LoadError(
                f"[{parts.module}.weight_packed] expected the words of shape {[rows, columns]}, "
                f"got {list(words)}"
            )
        groups = self.scales.shape(rows, columns)[1]
        scale = _scale_part(parts, ("weight_scale",), self.scales.shape(rows, columns))
        if not self.symmetric:
            parts.entry("weight_zero_point", ("int32",), (-(-rows // each), groups))
        ordered = parts.has("weight_g_idx")
        if ordered:
            parts.entry("weight_g_idx", ("int32",), (columns,))
        parts.skip(*_OF_ACTIVATIONS)

        def decode(start: int, stop: int) -> Grouped:
            values = unpack(parts.read("weight_packed")[start:stop], self.bits)[:, :columns]
            zeros = np.full((stop - start, groups), half, np.uint8)
            if not self.symmetric:
                stored = unpack(parts.read("weight_zero_point").T, self.bits)
                zeros = stored[:, start:stop].T
            group = self.scales.group(columns)
            if ordered:
                given = parts.read("weight_g_idx").astype(np.int64)
                # -1 throughout: the order was never changed.
                group = group if (given == -1).all() else given
                if not ((group >= 0) & (group < groups)).all():
                    raise LoadError(f"[{parts.module}.weight_g_idx] expected groups below {groups}")
            factors = as_float32(parts.read(scale)).reshape(-1, groups)
            return Grouped(values, self.scales.take(factors, start, stop, rows), zeros, group)

        return Linear((rows, columns), decode, "int4" if self.bits == 4 else "int8")


def compressed_tensors(config: QuantConfig) -> Scheme:
    """One group of settings for all linear layers: float8, int8, or packed int4 and int8."""
    config.only("quantization_status", "compressed", "frozen")
    config.unused("version", "global_compression_ratio")
    sparsity = config.mapping("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise LoadError(f"[{config.where}] 'sparsity_config' is not supported here, got {sparsity}")
    groups = config.mapping("config_groups")
    if len(groups) != 1:
        raise LoadError(
            f"[{config.where} config_groups] expected one group, got {sorted(groups) or 'none'}"
        )
    group = config.inner("config_groups").inner(next(iter(groups)))
    if group.names("targets") != ("Linear",):
        raise LoadError(
            f"[{group.where} targets] expected ['Linear'], got {group.raw.get('targets')!r}"
        )
    activations = _activations(group.mapping("input_activations"))
    layout = config.raw.get("format") or group.raw.get("format")
    config.unused("format")
    if group.raw.get("format") not in (None, layout):
        raise LoadError(f"[{group.where} format] expected {layout!r}, got {group.raw['format']!r}")
    group.unused("format")

    weights = group.inner("weights")
    bits, kind = weights.integer("num_bits"), weights.raw.get("type", "int")
    weights.unused("type", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.only("dynamic", False)
    weights.only("actorder", None, "weight", "static", "group", "dynamic")  # g_idx says it all
    dtypes: dict[tuple[Any, Any, int], str] = {
        ("float-quantized", "float", 8): "float8_e4m3",
        ("naive-quantized", "float", 8): "float8_e4m3",
        ("int-quantized", "int", 8): "int8",
        ("naive-quantized", "int", 8): "int8",
        ("pack-quantized", "int", 4): "",
        ("pack-quantized", "int", 8): "",
    }
    if (layout, kind, bits) not in dtypes:
        raise LoadError(
            f"[{config.where} format] expected float-quantized, int-quantized or pack-quantized "
            f"with 4 or 8 bits, got {layout!r} with type {kind!r} and num_bits {bits}"
        )
    scheme = _Compressed(
        dtype=dtypes[layout, kind, bits],
        bits=bits,
        scales=_strategy(weights),
        symmetric=weights.flag("symmetric", True) or kind == "float",
        kept=config.names("ignore"),
        activations=activations,
    )
    weights.refuse_rest()
    group.refuse_rest()
    return scheme


def _activations(settings: Mapping[str, Any]) -> Activations:
    if not settings:
        return None
    kind = {"type": "int", "symmetric": True, **settings}
    per_token = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip
    return "int8" if all(kind.get(key) == one for key, one in per_token.items()) else "other"


def _strategy(weights: QuantConfig) -> _Scales:
    strategy = weights.raw.get("strategy")
    size = weights.raw.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    weights.unused("strategy", "group_size", "block_structure")
    if strategy == "tensor":
        return _WHOLE
    if strategy == "channel":
        return _CHANNEL
    if strategy == "group":
        size = weights.integer("group_size")
        if size < 1:
            raise LoadError(f"[{weights.where} group_size] expected at least 1, got {size}")
        return _Scales((1, size))
    if strategy == "block":
        return _Scales(_block(weights, weights.raw.get("block_structure")))
    raise LoadError(
        f"[{weights.where} strategy] expected tensor, channel, group or block, got {strategy!r}"
    )
