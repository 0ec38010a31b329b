"""Multi-token prediction modules that lie inside a target's own checkpoint.

A module is a layer of the target's own kind over fc(cat) of two normed vectors: the embedding of
the next token and the target's hidden state behind its final norm. Three ways of naming and
ordering them are known: MiMo's, Qwen3-Next's and DeepSeek-V3's.
"""

from __future__ import annotations

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
    norm_output: bool = True
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
        norm_output=False,
    ),
)


def open_mtp(checkpoint: Checkpoint | None, *, dtype: str = "auto") -> HeadCheckpoint:
    """The module in an open checkpoint; its source stays the checkpoint's.

    Raises LoadError where there is none, or not exactly one of a known layout.
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
    layout, prefix, layer = _layout_of(tensors, fields.num_layers, label)
    if checkpoint.transform is not None:
        raise UnsupportedError(f"[{label}] modules of a {fields.family} model are not supported")
    names = {one: prefix + name for one, name in layout.names.items()}
    own: dict[str, bool] = {}
    for one in ("embedding", "lm_head"):
        own[one] = one in names and names[one] in tensors
        # A copy of the target's table is not held twice.
        if own[one] and _same(checkpoint, names[one], one):
            own[one] = False
            tensors.discard(names[one])
    for canonical, stored_name in checkpoint.layer_names(0).items():
        names[canonical] = layer + stored_name.removeprefix("model.layers.0.")
    head = HeadFields(
        **{**vars(fields), "num_layers": 1, "windows": (), "tied_embeddings": False},
        head_kind="fused",
        head_input_vocab=fields.vocab_size,
        head_feature_size=fields.hidden_size,
        head_hidden_first=layout.hidden_first,
        head_embedding_norm=True,
        head_hidden_norm=True,
        head_zero_first=layout.zero_first,
        head_norm_output=layout.norm_output,
        head_own_embedding=own["embedding"],
        head_own_lm_head=own["lm_head"],
    )
    opened = HeadCheckpoint(
        name=label,
        fields=head,
        source=source,
        names=names,
        feature_layers=(),
        feature_normed=True,
        dtype=dtype,
        transform=_one_more if layout.unit_norms else None,
        owns_source=False,
    )
    left = sorted(tensors - {names[one] for one in opened.names} - source.useless)
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise LoadError(f"[{label}] expected exactly a module's tensors, got unexpected {shown}")
    return opened


def _layout_of(tensors: set[str], num_layers: int, label: str) -> tuple[_Layout, str, str]:
    for layout in _LAYOUTS:
        first = num_layers if layout.first_is_num_layers else 0
        prefix = layout.prefix.replace("{i}", str(first))
        if prefix + layout.names["fc"] not in tensors:
            continue
        after = layout.layer.replace("{i}", str(first + 1))
        if any(one.startswith(after) for one in tensors):
            raise UnsupportedError(
                f"[{label}] expected one module, the only number supported here, got more: {after}*"
            )
        return layout, prefix, layout.layer.replace("{i}", str(first))
    raise LoadError(
        f"[{label}] expected MiMo's, Qwen3-Next's or DeepSeek-V3's names, got "
        f"{', '.join(sorted(tensors)[:8])}"
    )


def _same(checkpoint: Checkpoint, name: str, canonical: str) -> bool:
    """Whether a module's table is, bit for bit, the target's."""
    stored = checkpoint.stored_name(canonical)
    one, other = checkpoint.source.entries[name], checkpoint.source.entries.get(stored)
    if one != other:
        return False
    mine, its = checkpoint.source.read(name), checkpoint.source.read(stored)
    bits = np.uint16 if mine.dtype == np.uint16 else np.uint32
    return np.array_equal(mine.view(bits), its.view(bits))


def _one_more(canonical: str, array: NDArray[Any]) -> NDArray[Any]:
    """Norms of these modules are stored less 1."""
    return as_float32(array) + np.float32(1.0) if canonical.endswith("norm") else array
