"""Texts with the target's hidden states on disk, in shards that are whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CapacityError, InvalidArgumentError, LoadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Example", "ShardStore", "write_atomically"]


@dataclass(frozen=True)
class Example:
    """One text. Arrays may lie in a file's mapping."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.uint8]
    """[tokens]: whether it is to be learnt; 2 where it is the target's favourite, too."""
    features: NDArray[np.uint16]
    """bfloat16 bits [positions, states * hidden] of the first positions."""
    favourites: NDArray[np.int32] | None = None
    """[positions]: what the target finds likeliest behind each that is learnt from, else -1."""


def write_atomically(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


class ShardStore:
    """A folder of shards of a fixed number of records each, and what they were made with."""

    def __init__(self, folder: Path, made_with: dict[str, Any]) -> None:
        """Make or reopen a folder. Raises InvalidArgumentError where it was made otherwise."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "data.json"
        if manifest.exists():
            try:
                had = json.loads(manifest.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise LoadError(f"[{manifest}] cannot be read as JSON: {error}") from error
            wanted = json.loads(json.dumps(made_with))
            for key in sorted({*had, *wanted}):
                if had.get(key) != wanted.get(key):
                    raise InvalidArgumentError(
                        f"[{key}] expected {had.get(key)!r}, as the data in {folder} were made "
                        f"with, got {wanted.get(key)!r}: go on with that, or use another folder"
                    )
        else:
            write_atomically(manifest, json.dumps(made_with, indent=1) + "\n")

    def _name(self, shard: int, what: str) -> Path:
        return self.folder / f"shard-{shard:05d}.{what}"

    def has(self, shard: int) -> bool:
        """Whether it was written whole."""
        return self._name(shard, "json").exists()

    def write(self, shard: int, examples: Sequence[Example]) -> None:
        """Write a shard; its .json, which says that it is whole, comes last."""
        width = {one.features.shape[1] for one in examples}
        if len(width) > 1:
            raise InvalidArgumentError(f"[features] expected one width, got {sorted(width)}")
        arrays = {
            "lengths": np.array(
                [[len(one.tokens), len(one.features)] for one in examples], dtype=np.int64
            ).reshape(-1, 2),
            "tokens": _joined([one.tokens for one in examples], np.int32),
            "learnt": _joined([one.learnt for one in examples], np.uint8),
        }
        for what, array in arrays.items():
            np.save(self._name(shard, f"{what}.npy"), array)
        # One text after another, so that nothing is held twice.
        rows = sum(len(one.features) for one in examples)
        shape = (rows, width.pop() if width else 0)
        target = (
            np.lib.format.open_memmap(
                self._name(shard, "features.npy"), "w+", dtype=np.uint16, shape=shape
            )
            if rows
            else None
        )
        at = 0
        for one in examples:
            if target is not None:
                target[at : at + len(one.features)] = one.features
            at += len(one.features)
        if target is not None:
            target.flush()
        told = {"examples": len(examples), "rows": rows, "width": shape[1]}
        write_atomically(self._name(shard, "json"), json.dumps(told) + "\n")

    @staticmethod
    def bytes_of(examples: Sequence[Example]) -> int:
        """What a shard of these takes at most, favourites included."""
        rows = sum(len(one.features) for one in examples)
        tokens = sum(len(one.tokens) for one in examples)
        states = sum(one.features.nbytes for one in examples)
        headers = 5 * 128 + 128
        return states + 4 * rows + 5 * tokens + 16 * len(examples) + headers

    def shards(self) -> list[int]:
        """Those that are whole, in order."""
        return sorted(int(one.name[6:11]) for one in self.folder.glob("shard-?????.json"))

    def read(self, shard: int) -> list[Example]:
        """A shard's texts, mapped. Raises LoadError where a file is missing or damaged."""
        try:
            told = json.loads(self._name(shard, "json").read_text(encoding="utf-8"))
            tokens, learnt, lengths = (
                np.load(self._name(shard, f"{one}.npy"), mmap_mode="r")
                for one in ("tokens", "learnt", "lengths")
            )
            named = self._name(shard, "favourites.npy")
            favourites = np.load(named, mmap_mode="r") if named.exists() else None
            features = np.zeros((0, told["width"]), dtype=np.uint16)
            if told["rows"]:
                features = np.load(self._name(shard, "features.npy"), mmap_mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise LoadError(f"[{self.folder} shard {shard}] cannot be read: {error}") from error
        counted, rows = (int(one) for one in lengths.sum(0)) if len(lengths) else (0, 0)
        if (counted, counted, rows) != (len(tokens), len(learnt), len(features)):
            raise LoadError(f"[{self.folder} shard {shard}] expected {counted} tokens, got others")
        out, at, row = [], 0, 0
        for count, kept in lengths.tolist():
            out.append(
                Example(
                    tokens[at : at + count],
                    learnt[at : at + count],
                    features[row : row + kept],
                    None if favourites is None else favourites[row : row + kept],
                )
            )
            at, row = at + count, row + kept
        return out

    def has_favourites(self, shard: int) -> bool:
        """Whether they were added."""
        return self._name(shard, "favourites.npy").exists()

    def add_favourites(self, shard: int, favourites: Sequence[NDArray[np.int32]]) -> None:
        """Those of each text of a shard."""
        path = self._name(shard, "favourites.npy")
        partial = self._name(shard, "favourites.partial.npy")
        np.save(partial, _joined(favourites, np.int32))
        os.replace(partial, path)

    def bytes_used(self) -> int:
        """Of all files, half-written ones too."""
        return sum(one.stat().st_size for one in self.folder.glob("shard-*"))

    def drop_partial(self) -> None:
        """Let go of shards that were not written whole."""
        whole = {f"shard-{shard:05d}" for shard in self.shards()}
        for one in self.folder.glob("shard-*"):
            if one.name[:11] not in whole:
                with contextlib.suppress(FileNotFoundError):
                    one.unlink()

    def check_room(self, need: int) -> None:
        """Raise CapacityError where the disk has not so many bytes more."""
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise CapacityError(
                f"[disk] expected at most the {free} bytes that are free in {self.folder}, got a "
                f"need of up to {need}: fewer records, shorter ones, or --max-disk"
            )

    def examples(self) -> Iterator[Example]:
        """All texts of all shards, in order."""
        for shard in self.shards():
            yield from self.read(shard)


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays]).astype(dtype)
