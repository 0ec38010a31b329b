"""Checkpoints in the public formats: config.json and one safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from .shards import write_atomically

__all__ = ["write_checkpoint"]


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    name: str = "model.safetensors",
) -> None:
    """Write both, each whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.partial"
    # transformers asks for the format.
    save_file(
        {one: tensor.contiguous() for one, tensor in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    os.replace(partial, folder / name)
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
