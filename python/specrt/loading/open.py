"""`open_checkpoint`: finds out what a target is, and opens it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import InvalidArgumentError, LoadError, UnsupportedError
from .checkpoint import Checkpoint, Kind, check_tie, resolve_dtype, token_ids
from .families import FAMILIES, fields_of
from .fields import ModelFields
from .hf_config import read_json
from .source import Source

if TYPE_CHECKING:
    from ..text import Tokenizer

__all__ = ["find_folder", "open_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SMALL_FILES = [
    "*.json",
    "*.model",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "*.tiktoken",
]


class _Tokens(TypedDict):
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation: dict[str, Any]
    mtp_modules: int | None


def open_checkpoint(
    target: Any, *, dtype: str = "auto", max_model_len: int | None = None
) -> Checkpoint:
    """Open and check a checkpoint; no weight is read yet.

    `target` is a local folder, a hub id, a .gguf file, a folder with one .gguf file, or a
    transformers model in memory. `dtype` is "auto", "float32", "bfloat16", "int8", "int4" or
    "w8a8". `max_model_len`, in tokens, decides longrope's factors; None is all that the model can.

    Raises LoadError where the checkpoint cannot be found or is not exactly a model of a known
    family, UnsupportedError where it needs what this build or environment lacks, and
    InvalidArgumentError for a wrong argument.
    """
    if max_model_len is not None and max_model_len < 1:
        raise InvalidArgumentError(f"[max_model_len] expected at least 1, got {max_model_len}")
    if hasattr(target, "state_dict") and hasattr(target, "config"):
        return _open_model(target, dtype, max_model_len)
    if not isinstance(target, (str, os.PathLike)):
        raise InvalidArgumentError(
            "[target] expected a path, a hub id or a transformers model, "
            f"got {type(target).__name__}"
        )
    name = os.fspath(target)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"[{name}] expected a folder or a .gguf file, got another file")
        return _open_gguf(name, path, dtype)
    folder = find_folder(target)
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _open_gguf(name, files[0], dtype)
        if files:
            names = ", ".join(one.name for one in files)
            raise LoadError(f"[{name}] expected one .gguf file, got {names}: give the path of one")
        raise LoadError(f"[{name}] expected a config.json or a .gguf file in the folder, got none")
    return _open_folder(name, folder, dtype, max_model_len)


def find_folder(
    target: str | os.PathLike[str], *, weights: bool = True, files: Sequence[str] | None = None
) -> Path:
    """A local folder, or a hub repository's snapshot in the hub's own cache.

    Without `weights`, only configs and tokenizer files are fetched; `files` are those of weights,
    the best first, where they are not a model's. Raises LoadError.
    """
    name = os.fspath(target)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise LoadError(f"[{name}] no such file or folder, and not a hub id")
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> Path:
        try:
            # Subfolders hold other formats of the same weights.
            return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*"))
        except Exception as error:  # the client raises many kinds
            raise LoadError(
                f"[{name}] no such folder, and cannot be had from the hub: {error}"
            ) from None  # the client's own chain is long and says no more

    if not weights:
        return fetch(_SMALL_FILES)
    if files is not None:
        for file in files:
            folder = fetch([*_SMALL_FILES, file])
            if (folder / file).is_file():
                break
        return folder
    folder = fetch([*_SMALL_FILES, "model*.safetensors"])
    if not list(folder.glob("*.safetensors")):
        folder = fetch([*_SMALL_FILES, "pytorch_model*.bin"])
    return folder


def _open_folder(name: str, folder: Path, dtype: str, max_model_len: int | None) -> Checkpoint:
    from .quantised import QuantisedSource, read_scheme
    from .safetensors_files import SafetensorsSource, shards_of
    from .torch_state import read_pickles

    raw = read_json(folder / "config.json")
    scheme = read_scheme(raw, resolve_dtype(dtype, set()))
    fields = fields_of(raw, max_model_len=max_model_len)
    readers: list[tuple[Kind, str, Callable[..., Source]]] = [
        ("safetensors", "model.safetensors", SafetensorsSource),
        ("torch", "pytorch_model.bin", read_pickles),
    ]
    for kind, file, reader in readers:
        index = f"{file}.index.json"
        if (folder / index).is_file():
            shards = shards_of(folder, index)
            source = reader([folder / one for one in sorted(set(shards.values()))], shards)
        elif (folder / file).is_file():
            source = reader([folder / file])
        else:
            continue
        if scheme is not None:
            if kind != "safetensors":
                source.close()
                raise LoadError(
                    f"[{file}] quantised weights are read from safetensors only, got a pickle"
                )
            source = QuantisedSource(source, scheme)
        generation = folder / "generation_config.json"
        tokens = _tokens(raw, read_json(generation) if generation.is_file() else {}, fields)
        return _finish(
            name, kind, fields, source, dtype, tokens, tokenizer=lambda: _tokenizer_of(folder)
        )
    raise LoadError(
        f"[{name}] expected model.safetensors, pytorch_model.bin, or the index of either, got none"
    )


def _open_model(model: Any, dtype: str, max_model_len: int | None) -> Checkpoint:
    from .torch_state import StateSource

    label = type(model).__name__
    if not hasattr(model.config, "to_dict"):
        raise InvalidArgumentError(f"[target] expected a transformers model, got {label}")
    # A subclass of a known class holds the same tensors.
    classes = [one.__name__ for one in type(model).__mro__]
    raw = {**model.config.to_dict(), "architectures": classes}
    if raw.get("quantization_config"):
        raise LoadError(
            f"[{label}.config quantization_config] expected unquantised weights in memory, got "
            f"{raw['quantization_config']!r}: open the checkpoint's folder instead"
        )
    fields = fields_of(raw, f"{label}.config", max_model_len=max_model_len)
    generation = getattr(model, "generation_config", None)
    tokens = _tokens(raw, generation.to_dict() if generation is not None else {}, fields)
    return _finish(label, "memory", fields, StateSource(model.state_dict(), label), dtype, tokens)


def _finish(
    name: str,
    kind: Kind,
    fields: ModelFields,
    source: Source,
    dtype: str,
    tokens: _Tokens,
    tokenizer: Callable[[], Tokenizer | None] = lambda: None,
) -> Checkpoint:
    family = FAMILIES[fields.family]
    names = family.names
    try:
        check_tie(fields, source, names, name)
        return Checkpoint(
            name=name,
            kind=kind,
            config=fields,
            source=source,
            names=names,
            ignored=family.ignored,
            dtype=dtype,
            transform=family.transform,
            tokenizer=tokenizer,
            **tokens,
        )
    except Exception:
        source.close()
        raise


def _tokens(raw: dict[str, Any], generation: dict[str, Any], fields: ModelFields) -> _Tokens:
    """generation_config.json stands before config.json, as when transformers generates."""

    def first(key: str) -> tuple[int, ...]:
        for place in (generation, raw):
            found = token_ids(place.get(key), fields.vocab_size, key)
            if found:
                return found
        return ()

    bos = first("bos_token_id")
    modules = raw.get("num_nextn_predict_layers", raw.get("mtp_num_hidden_layers"))
    return {
        "eos_token_ids": first("eos_token_id"),
        "bos_token_id": bos[0] if bos else None,
        "generation": generation,
        "mtp_modules": modules if type(modules) is int else None,
    }


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / file).is_file() for file in files):
        return None
    from ..text import Tokenizer

    return Tokenizer.from_pretrained(folder)


def _open_gguf(name: str, path: Path, dtype: str) -> Checkpoint:
    try:
        from .gguf_model import open_gguf
    except ImportError as error:
        raise UnsupportedError(f"[{name}] reading GGUF needs the gguf package: {error}") from error
    return open_gguf(name, path, dtype)
