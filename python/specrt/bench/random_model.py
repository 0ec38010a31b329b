"""Models of known shapes with random weights: for what depends on sizes, not on what is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import InvalidArgumentError
from ..loading import ModelFields

__all__ = ["SHAPES", "random_model", "sizes"]

_NAMES = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied")
_SIZES = {
    "tiny": (64, 128, 2, 4, 2, 16, 512, True),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}
SHAPES = tuple(_SIZES)


def sizes(shape: str) -> dict[str, int]:
    """Of one of SHAPES: hidden, ffn, layers, heads, kv_heads, head_dim, vocab, tied."""
    return dict(zip(_NAMES, _SIZES[shape], strict=True))


def random_model(shape: str, folder: Path, *, dtype: str = "bfloat16", layers: int = 0) -> Path:
    """Writes one into `folder` as `Engine.save` would, and gives the file.

    shape: one of SHAPES. layers: as many instead of the shape's own; 0 takes those.
    """
    if shape not in _SIZES:
        raise InvalidArgumentError(f"[random] expected one of {', '.join(SHAPES)}, got {shape!r}")
    hidden, ffn, own_layers, heads, kv_heads, head_dim, vocab, tied = _SIZES[shape]
    fields = ModelFields(
        family=shape,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers or own_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        rope_inv_freq=tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)),
        tied_embeddings=tied,
    )
    fields.check()
    config = _core.ModelConfig(**vars(fields), eos_token_ids=[])
    builder = _core.ModelBuilder(config, "bfloat16" if dtype == "auto" else dtype)
    # Few numbers over and over; a prime of them, so that no row of a matrix repeats another.
    noise = np.random.default_rng(0).normal(0, 1, 1048583).astype(np.float32)
    # Small embeddings beside layers that say something: else a tied head repeats the last token.
    small, large = _bits(0.02 * noise), _bits(noise / np.sqrt(np.float32(hidden)))
    for index, (name, dims) in enumerate(_core.tensors_of(config)):
        size = int(np.prod(dims))
        if len(dims) == 1:
            tensor = np.full(dims, 0x3F80, np.uint16)  # norms are ones
        else:
            bits = small if name == "embedding" else large
            tensor = np.resize(np.roll(bits, 7919 * index), size).reshape(dims)
        builder.set(name, "bfloat16", tensor)
    path = folder / f"{shape}.specrt"
    builder.build().save(str(path))
    return path


def _bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Of bfloat16, cut off."""
    bits: npt.NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits
