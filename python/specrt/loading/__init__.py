"""Checkpoints: from a folder, a hub id, a GGUF file or an in-memory model to canonical tensors.

    with open_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct") as checkpoint:
        for tensor in checkpoint.tensors():
            ...

Everything is checked when a checkpoint is opened, from headers alone: the architecture, every
config key that changes the arithmetic, the name and the shape of every tensor. Adding a family is
adding a table to `families.py`.

Importing this package is cheap: the readers of each format are imported when one is opened.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .fields import ModelFields, tensor_shapes
from .open import open_checkpoint
from .source import Tensor

__all__ = ["Checkpoint", "ModelFields", "Tensor", "open_checkpoint", "tensor_shapes"]
