"""Multi-token prediction modules that lie inside a target's own checkpoint.

A module is a layer of the target's own kind over fc(cat) of two normed vectors: the embedding of
the next token and the target's hidden state behind its final norm; for a further module, those of
the token after it and the module before, behind that one's final norm (arXiv 2412.19437, section
2.2). Three ways of naming and ordering them are known: MiMo's, Qwen3-Next's and DeepSeek-V3's.

DeepSeek's own code never feeds a module's state back, and engines differed in whether it passes
shared_head.norm first. It does here: hidden_norm was trained on states behind a final norm, SGLang
and vLLM's GLM do the same, and measured acceptance is higher so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError, UnsupportedError
from .head_fields import HeadCheckpoint, HeadFields
from .mtp_names import mtp_tensors
from .source import as_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .checkpoint import Checkpoint

__all__ = ["open_mtp"]


@dataclass(frozen=True)
class _Layout:
    """How a family names a module's tensors; `{i}` is the module, counted as `first` says."""

    prefix: str
    layer: str
    """In front of the layer's own names, as the target's have them behind "model.layers.{i}."."""
    names: Mapping[str, str]
    first_is_num_layers: bool = False
    hidden_first: bool = False
    zero_first: bool = False
    unit_norms: bool = False
    """Norms multiply by 1 + weight."""


_LAYOUTS = (
    _Layout(
        prefix="model.mtp_layers.{i}.",
        layer="model.mtp_layers.{i}.",
        names={
            "embedding_norm": "token_layernorm.weight",
            "hidden_norm": "hidden_layernorm.weight",
            "fc": "input_proj.weight",
            "norm": "final_layernorm.weight",
        },
        hidden_first=True,
    ),
    _Layout(
        prefix="mtp.",
        layer="mtp.layers.{i}.",
        names={
            "embedding_norm": "pre_fc_norm_embedding.weight",
            "hidden_norm": "pre_fc_norm_hidden.weight",
            "fc": "fc.weight",
            "norm": "norm.weight",
        },
        unit_norms=True,
    ),
    _Layout(
        prefix="model.layers.{i}.",
        layer="model.layers.{i}.",
        names={
            "embedding_norm": "enorm.weight",
            "hidden_norm": "hnorm.weight",
            "fc": "eh_proj.weight",
            "norm": "shared_head.norm.weight",
            "embedding": "embed_tokens.weight",
            "lm_head": "shared_head.head.weight",
        },
        first_is_num_layers=True,
        zero_first=True,
    ),
)


def open_mtp(checkpoint: Checkpoint | None, *, dtype: str = "auto") -> HeadCheckpoint:
    """The first module in an open checkpoint; its source stays the checkpoint's.

    Further modules are in its `later`. Raises LoadError where there is none, or none of a known
    layout.
    """
    if checkpoint is None:
        raise LoadError(
            "[mtp] expected a checkpoint with a multi-token prediction module, got a saved file: "
            "those hold the target alone"
        )
    fields, source = checkpoint.config, checkpoint.source
    tensors = mtp_tensors(source.entries, fields.num_layers)
    label = f"{checkpoint.name} mtp"
    if not tensors:
        raise LoadError(
            f"[{label}] expected tensors of a multi-token prediction module (model.mtp_layers.0., "
            f"mtp. or model.layers.{fields.num_layers}.), got none"
        )
    if fields.norm_placement != "pre":
        raise UnsupportedError(
            f"[{label}] expected a target with norms before its blocks, got "
            f"{fields.norm_placement!r}"
        )
    layout, first, count = _layout_of(tensors, fields.num_layers, label)
    if checkpoint.mtp_modules not in (None, count):
        warnings.warn(
            f"{label}: the config says {checkpoint.mtp_modules} modules, the tensors are those of "
            f"{count}: {count} draft",
            stacklevel=3,
        )
    if checkpoint.transform is not None:
        raise UnsupportedError(f"[{label}] modules of a {fields.family} model are not supported")
    modules = [_names(checkpoint, layout, first + k) for k in range(count)]
    own: dict[str, bool] = {}
    for one in ("embedding", "lm_head"):
        stored = [names[one] for names in modules if one in names]
        # Copies of the target's table are not held twice.
        own[one] = any(name in tensors for name in stored)
        if own[one] and all(_same(checkpoint, name, one) for name in stored):
            own[one] = False
            tensors -= set(stored)
    head = HeadFields(
        **{**vars(fields), "num_layers": 1, "windows": (), "tied_embeddings": False},
        head_kind="fused",
        head_input_vocab=fields.vocab_size,
        head_feature_size=fields.hidden_size,
        head_hidden_first=layout.hidden_first,
        head_embedding_norm=True,
        head_hidden_norm=True,
        head_zero_first=layout.zero_first,
        head_norm_output=True,
        head_own_embedding=own["embedding"],
        head_own_lm_head=own["lm_head"],
    )
    opened: list[HeadCheckpoint] = []
    for names in reversed(modules):
        opened.append(
            HeadCheckpoint(
                name=label,
                fields=head,
                source=source,
                names=names,
                feature_layers=(),
                feature_normed=True,
                dtype=dtype,
                transform=_one_more if layout.unit_norms else None,
                owns_source=False,
                later=tuple(reversed(opened)),
            )
        )
    used = {names[one] for names in modules for one in opened[0].names}
    left = sorted(tensors - used - source.useless)
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise LoadError(f"[{label}] expected exactly a module's tensors, got unexpected {shown}")
    return opened[-1]


def _names(checkpoint: Checkpoint, layout: _Layout, index: int) -> dict[str, str]:
    """Canonical names to those of one module."""
    prefix, layer = (one.replace("{i}", str(index)) for one in (layout.prefix, layout.layer))
    names = {one: prefix + name for one, name in layout.names.items()}
    for canonical, stored in checkpoint.layer_names(0).items():
        names[canonical] = layer + stored.removeprefix("model.layers.0.")
    return names


def _layout_of(tensors: set[str], num_layers: int, label: str) -> tuple[_Layout, int, int]:
    """A layout, the index of its first module, and how many there are."""
    for layout in _LAYOUTS:
        first = num_layers if layout.first_is_num_layers else 0
        if layout.prefix.replace("{i}", str(first)) + layout.names["fc"] not in tensors:
            continue
        count = 1
        # Counted from the tensors; what does not belong to them is named as unexpected.
        while any(
            one.startswith(layout.layer.replace("{i}", str(first + count))) for one in tensors
        ):
            count += 1
        return layout, first, count
    raise LoadError(
        f"[{label}] expected MiMo's, Qwen3-Next's or DeepSeek-V3's names, got "
        f"{', '.join(sorted(tensors)[:8])}"
    )


def _same(checkpoint: Checkpoint, name: str, canonical: str) -> bool:
    """Whether a module's table is, bit for bit, the target's."""
    stored = checkpoint.stored_name(canonical)
    one, other = checkpoint.source.entries.get(name), checkpoint.source.entries.get(stored)
    if one is None or one != other:
        return False
    mine, its = checkpoint.source.read(name), checkpoint.source.read(stored)
    bits = np.uint16 if mine.dtype == np.uint16 else np.uint32
    return np.array_equal(mine.view(bits), its.view(bits))


def _one_more(canonical: str, array: NDArray[Any]) -> NDArray[Any]:
    """Norms of these modules are stored less 1."""
    return as_float32(array) + np.float32(1.0) if canonical.endswith("norm") else array
