"""Which tensors of a checkpoint belong to modules for multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["mtp_tensors"]

_LAYER_INDEX = re.compile(r"model\.layers\.(\d+)\.")


def mtp_tensors(entries: Mapping[str, Any], num_layers: int) -> set[str]:
    """Names of the tensors that belong to modules, not to the model of `num_layers` layers."""
    found = {one for one in entries if one.startswith(("mtp.", "model.mtp_layers."))}
    for one in entries:
        layer = _LAYER_INDEX.match(one)
        if layer is None or int(layer[1]) < num_layers:
            continue
        if f"model.layers.{layer[1]}.eh_proj.weight" in entries:
            found.add(one)
    return found
