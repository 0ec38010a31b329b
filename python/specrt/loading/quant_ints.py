"""GPTQ and AWQ: int4 in 32-bit words, a 16-bit scale and a zero point for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .codes import Grouped
from .quantised import Linear, Parts, QuantConfig, Scheme
from .source import Entry, as_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["awq", "gptq", "unpack"]

SCALES = ("float16", "bfloat16", "float32")
# AWQ's words hold eight neighbouring outputs in this order, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: NDArray[Any], bits: int = 4) -> NDArray[np.uint8]:
    """Values of 4 or 8 bits out of int32 words [rows, n]: [rows, n * 32 / bits], low bits first."""
    packed = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    if bits == 8:
        return packed
    values = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., 0])
    np.right_shift(packed, 4, out=values[..., 1])
    return values.reshape(len(packed), -1)


@dataclass(frozen=True)
class _Gptq(Scheme):
    group_size: int
    act_order: bool
    zero_offset: int
    kept: tuple[str, ...] = ()

    def module_of(self, name: str, entry: Entry) -> str | None:
        return name.removesuffix(".qweight") if name.endswith(".qweight") else None

    def open(self, parts: Parts) -> Linear:
        """qweight [in/8, out], scales [groups, out], qzeros [groups, out/8], g_idx [in].

        Words run along the inputs in qweight, along the outputs in qzeros.
        """
        words = parts.entry("qweight", ("int32",), None).shape
        if len(words) != 2:
            raise LoadError(f"[{parts.module}.qweight] expected two dimensions, got {list(words)}")
        columns, rows = 8 * words[0], words[1]
        size = columns if self.group_size == -1 else self.group_size
        groups = -(-columns // size)
        parts.entry("scales", SCALES, (groups, rows))
        parts.entry("qzeros", ("int32",), (groups, -(-rows // 8)))
        if self.act_order or parts.has("g_idx"):
            parts.entry("g_idx", ("int32",), (columns,))
            ordered = True
        else:
            ordered = False

        def decode(start: int, stop: int) -> Grouped:
            group = np.arange(columns) // size
            if ordered:
                group = parts.read("g_idx").astype(np.int64)
                if not ((group >= 0) & (group < groups)).all():
                    raise LoadError(f"[{parts.module}.g_idx] expected groups below {groups}")
            scales = as_float32(parts.read("scales")[:, start:stop]).T
            stored = unpack(parts.read("qzeros"))[:, start:stop].T
            # The mask as in AutoGPTQ: a stored 15 that stands for 16 wraps around to 0.
            zeros = (stored + np.uint8(self.zero_offset)) & np.uint8(15)
            values = unpack(parts.read("qweight")[:, start:stop].T)
            return Grouped(values, scales, zeros, group)

        return Linear((rows, columns), decode, "int4")


def _group_size(config: QuantConfig) -> int:
    size = config.integer("group_size", 128)
    if size != -1 and (size < 8 or size % 8):
        raise LoadError(f"[{config.where} group_size] expected a multiple of 8 or -1, got {size}")
    return size


# How the weights were found, and which kernel its makers would run.
_HOW_IT_WAS_MADE = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_percent", "damp_auto_increment", "dataset", "desc_act", "disable_exllama", "do_fuse",
    "exllama_config", "fuse_max_seq_len", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_fuse", "mse", "pad_token_id", "static_groups",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip


def gptq(config: QuantConfig) -> Scheme:
    """AutoGPTQ's and GPTQModel's, in the first format (zero points less one) and the second."""
    config.only("bits", 4)
    config.integer("bits")
    config.flag("sym", True)  # the stored zero points say it all
    config.only("pack_dtype", "int32")
    config.flag("lm_head", False)  # as do the stored tensors
    key = "checkpoint_format" if config.raw.get("checkpoint_format") is not None else "format"
    config.unused("checkpoint_format", "format", *_HOW_IT_WAS_MADE)
    config.only(key, "gptq", "gptq_v2")
    second = config.raw.get(key) == "gptq_v2"
    return _Gptq(
        group_size=_group_size(config),
        act_order=config.flag("desc_act", False),
        zero_offset=0 if second else 1,
        kept=config.names("modules_to_not_convert"),
    )


@dataclass(frozen=True)
class _Awq(Scheme):
    group_size: int
    kept: tuple[str, ...] = ()

    def module_of(self, name: str, entry: Entry) -> str | None:
        return name.removesuffix(".qweight") if name.endswith(".qweight") else None

    def open(self, parts: Parts) -> Linear:
        """qweight [in, out/8], scales [groups, out], qzeros [groups, out/8]: by outputs."""
        words = parts.entry("qweight", ("int32",), None).shape
        if len(words) != 2:
            raise LoadError(f"[{parts.module}.qweight] expected two dimensions, got {list(words)}")
        columns, rows = words[0], 8 * words[1]
        size = columns if self.group_size == -1 else self.group_size
        groups = -(-columns // size)
        parts.entry("scales", SCALES, (groups, rows))
        parts.entry("qzeros", ("int32",), (groups, words[1]))

        def outputs(part: str, start: int, stop: int) -> NDArray[np.uint8]:
            """Outputs [start, stop) of a packed part, as [outputs, inputs or groups]."""
            first = start // 8
            stored = unpack(parts.read(part)[:, first : -(-stop // 8)])
            ordered = stored.reshape(len(stored), -1, 8)[..., np.argsort(_AWQ_ORDER)]
            return ordered.reshape(len(stored), -1).T[start - 8 * first : stop - 8 * first]

        def decode(start: int, stop: int) -> Grouped:
            scales = as_float32(parts.read("scales")[:, start:stop]).T
            group = np.arange(columns) // size
            values = np.ascontiguousarray(outputs("qweight", start, stop))
            return Grouped(values, scales, outputs("qzeros", start, stop), group)

        return Linear((rows, columns), decode, "int4")


def awq(config: QuantConfig) -> Scheme:
    """AutoAWQ's GEMM layout, the one that is published."""
    config.only("bits", 4)
    config.only("zero_point", True)
    for key in ("version", "format"):
        value = config.raw.get(key)
        if isinstance(value, str) and value.lower() == "gemm":
            config.unused(key)
        else:
            config.only(key, "gemm")
    config.only("backend", "auto", "autoawq")
    config.unused("sym", *(one for one in _HOW_IT_WAS_MADE if one != "backend"))
    return _Awq(_group_size(config), config.names("modules_to_not_convert"))
