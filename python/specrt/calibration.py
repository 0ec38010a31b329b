"""Rounding to int4 with a text to go by: GPTQ, layer after layer.

A weight's error matters as far as the inputs of real text make it matter, and what one input's
weight gets wrong, those of other inputs can partly make up for. So a text runs through the model,
one layer at a time. H, the sum of x x' over its positions, is all that a matrix's rounding needs to
know: inputs are rounded in order, and each error goes, through H's inverse, into the weights of the
inputs that are still to come. Each layer sees what the rounded layers before it made of the text.

Held at a time, beside the packed result: the residual stream of the text; a layer's weights; H of
its matrices, and a few more of that size for the matrix at hand, in float64.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from .errors import InvalidArgumentError, LoadError, NumericError
from .loaded import progress, set_tensor, tokenizer_of
from .loading import Checkpoint, open_checkpoint
from .loading.codes import GROUP, Codes
from .loading.quantised import to_bfloat16
from .loading.source import Tensor, as_float32
from .planning import SAVED_SUFFIX, core_config, shape_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Moments = NDArray[np.float64]

__all__ = ["quantize"]

CHUNK = 2048
"""Positions that run as one sequence."""

LEAST = 256
"""Tokens below which a text tells too little to be worth the run."""

DAMPING = 0.5
"""Of each input's own second moment, added to it: what a text of some thousand tokens says of how
inputs go together is believed less than what it says of each. On another text, errors of the demo
model's gates are a quarter smaller than with 0.05; 0.3 to 1 differ little. A share of the mean
instead, as is usual, would drown most inputs where few are huge, as in what `down` reads."""

# Matrices by what they read, in the order in which the core's `trace_layer` gives the inputs.
_READERS = (
    ("attention.q", "attention.k", "attention.v"),
    ("attention.o",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)


def quantize(
    target: Any,
    text: str | Sequence[int],
    path: str | os.PathLike[str],
    *,
    dtype: str = "int4",
    tokenizer: Any = None,
    max_model_len: int | None = None,
) -> None:
    """Round a checkpoint to int4 by what a text makes its matrices read, and write the result.

    `target` is what `Engine` loads, and `path` what `Engine(path, tokenizer=target)` then maps: its
    name ends in .specrt. `text`, or its token ids, should be like what the model is going to read
    and write, some thousand tokens of it; each counts in time. Layers that the checkpoint holds as
    int4 already stay as they are. A progress bar on a terminal.

    Raises InvalidArgumentError for another dtype, a text of less than 256 tokens and a path that
    cannot be written, NumericError where the text makes values that are not finite, and what
    opening the checkpoint raises.
    """
    name = _checked_path(path)
    if dtype != "int4":
        raise InvalidArgumentError(
            f"[dtype] expected 'int4': others lose too little to gain by a text, got {dtype!r}"
        )
    if isinstance(target, (str, os.PathLike)) and os.fspath(target).endswith(SAVED_SUFFIX):
        raise InvalidArgumentError(
            f"[target] expected a checkpoint, got {os.fspath(target)!r}, whose weights are packed"
        )
    with open_checkpoint(target, dtype=dtype, max_model_len=max_model_len) as checkpoint:
        ids = _token_ids(checkpoint, text, tokenizer)
        streams = _embedded(checkpoint, _chunks(checkpoint, ids, max_model_len))
        builder = _core.ModelBuilder(shape_of(checkpoint).config, dtype)
        try:
            for one in checkpoint.names:
                if not one.startswith("layers."):
                    set_tensor(builder, checkpoint, one)
            layers = range(checkpoint.config.num_layers)
            for index in progress(layers, f"Rounding {Path(checkpoint.name).name} to {dtype}"):
                streams = _round_layer(builder, checkpoint, index, streams)
        except InvalidArgumentError as error:
            raise LoadError(f"[{checkpoint.name}] {error}") from error
    builder.build().save(name)


def _checked_path(path: str | os.PathLike[str]) -> str:
    """Minutes of work should not end at a name that could have been looked at before."""
    name = os.fspath(path)
    if not name.endswith(SAVED_SUFFIX):
        raise InvalidArgumentError(f"[path] expected a name ending in {SAVED_SUFFIX}, got {name!r}")
    if not Path(name).absolute().parent.is_dir():
        raise InvalidArgumentError(f"[path] expected a name in an existing folder, got {name!r}")
    return name


def _token_ids(checkpoint: Checkpoint, text: str | Sequence[int], given: Any) -> list[int]:
    if isinstance(text, str):
        tokenizer = tokenizer_of(checkpoint, given)
        if tokenizer is None:
            raise InvalidArgumentError(
                "[text] expected token ids for a model without a tokenizer, got a string"
            )
        ids = tokenizer.encode(text)
    else:
        ids = [int(one) for one in text]
    vocabulary = checkpoint.config.vocab_size
    if not all(0 <= one < vocabulary for one in ids):
        raise InvalidArgumentError(f"[text] expected tokens from 0 to {vocabulary - 1}, got others")
    if len(ids) < LEAST:
        raise InvalidArgumentError(f"[text] expected at least {LEAST} tokens, got {len(ids)}")
    return ids


def _chunks(checkpoint: Checkpoint, ids: list[int], limit: int | None) -> list[list[int]]:
    """Sequences that the model can read, each with the first token that it is used to."""
    first = [ids[0]] if ids[0] == checkpoint.bos_token_id else []
    most = min(CHUNK, checkpoint.config.max_position_embeddings, limit or CHUNK)
    size = max(1, most - len(first))
    rest = ids[len(first) :]
    return [first + rest[at : at + size] for at in range(0, len(rest), size)]


def _embedded(checkpoint: Checkpoint, chunks: list[list[int]]) -> list[Floats]:
    """The residual stream in front of the first layer."""
    table = checkpoint.tensor("embedding").array
    scale = np.float32(checkpoint.config.embedding_scale)
    return [as_float32(table[chunk]) * scale for chunk in chunks]


def _round_layer(
    builder: _core.ModelBuilder, checkpoint: Checkpoint, index: int, streams: list[Floats]
) -> list[Floats]:
    """Gives the builder a layer's tensors; the stream behind the layer, as it is with them."""
    prefix = f"layers.{index}."
    names = [one for one in checkpoint.names if one.startswith(prefix)]
    tensors = {one.removeprefix(prefix): checkpoint.tensor(one) for one in names}
    moments = _moments(_layer_model(checkpoint, index, tensors), streams)
    for readers, moment in zip(_READERS, moments, strict=True):
        if not np.isfinite(moment).all():
            raise NumericError(
                f"[{prefix}{readers[0]}] expected finite inputs from the text, got others"
            )
        factor: Floats | None = None
        for reader in readers:
            codes = checkpoint.codes(prefix + reader, "int4")
            if codes is None:
                if factor is None:
                    factor = factor_of(moment)
                codes = compensated(as_float32(tensors[reader].array), factor)
                meant = to_bfloat16(values_of(codes))
                tensors[reader] = Tensor(prefix + reader, "bfloat16", meant)
            builder.set_quantised(
                prefix + reader,
                "int4",
                codes.codes,
                codes.scales,
                codes.minima,
                zero_points=codes.zero_points,
            )
    matrices = {reader for readers in _READERS for reader in readers}
    for one in names:
        if one.removeprefix(prefix) not in matrices:
            set_tensor(builder, checkpoint, one)
    rounded = _layer_model(checkpoint, index, tensors)
    return [_core.trace_layer(rounded, stream)[-1] for stream in streams]


def _layer_model(checkpoint: Checkpoint, index: int, tensors: Mapping[str, Tensor]) -> _core.Model:
    """One layer as a model of its own, in bfloat16 as int4 computes. No token is read."""
    fields = replace(
        checkpoint.config,
        num_layers=1,
        windows=checkpoint.config.windows[index : index + 1],
        vocab_size=1,
        tied_embeddings=True,
    )
    config = core_config(fields, ())
    builder = _core.ModelBuilder(config, "bfloat16")
    for name, shape in _core.tensors_of(config):
        if name.startswith("layers.0."):
            tensor = tensors[name.removeprefix("layers.0.")]
            builder.set(name, tensor.dtype, tensor.array)
        else:
            builder.set(name, "float32", np.zeros(shape, np.float32))
    return builder.build()


def _moments(layer: _core.Model, streams: list[Floats]) -> list[Moments]:
    """H for each of `_READERS`, over all positions."""
    sums: list[Moments] = []
    for stream in streams:
        inputs = _core.trace_layer(layer, stream)[:-1]
        found = [(one.T @ one).astype(np.float64) for one in inputs]
        sums = [mine + more for mine, more in zip(sums, found, strict=True)] if sums else found
    return sums


def factor_of(moments: Moments, damping: float = DAMPING) -> Floats:
    """The upper U with U' U = (H + damping)^-1."""
    diagonal = np.diagonal(moments)
    # Inputs that the text never set keep something too, or there were no inverse.
    least = 1e-6 * float(diagonal.mean()) or 1.0
    damped = moments + np.diag(damping * diagonal + least)
    # H = R R' with an upper R, by Cholesky's factor of H back to front; then U = R^-1.
    root = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    factor: Floats = np.triu(np.linalg.inv(root)).astype(np.float32)
    return factor


def compensated(weight: Floats, factor: Floats) -> Codes:
    """A matrix [outputs, inputs] as int4."""
    rows, columns = weight.shape
    rest = weight.astype(np.float32)
    codes = np.empty((rows, columns), np.int8)
    groups = -(-columns // GROUP)
    scales, minima = (np.empty((rows, groups), np.float32) for _ in range(2))
    for index in range(groups):
        end = min(columns, (index + 1) * GROUP)
        here = slice(index * GROUP, end)
        codes[:, here], scale, minimum, errors = _core.quantise_compensated(
            np.ascontiguousarray(rest[:, here]), np.ascontiguousarray(factor[here, here])
        )
        scales[:, index], minima[:, index] = scale[:, 0], minimum[:, 0]
        rest[:, end:] -= errors @ factor[here, end:]
    return Codes("int4", codes, scales, minima)


def values_of(codes: Codes) -> Floats:
    """The weights that int4 codes stand for, before they round to bfloat16."""
    assert codes.minima is not None
    columns = codes.codes.shape[1]
    scales, minima = (
        np.repeat(one, GROUP, axis=1)[:, :columns] for one in (codes.scales, codes.minima)
    )
    values = codes.codes.astype(np.float32)
    result: Floats = scales * (values + minima) if codes.zero_points else scales * values + minima
    return result
