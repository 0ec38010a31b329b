"""Medusa heads: the layouts of the reference implementation and of vLLM.

The tensors say how many heads and residual blocks there are; many published configs do not. What a
config says beyond that has to agree with them, and every tensor is read or named in an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import InvalidArgumentError, LoadError
from .checkpoint import resolve_dtype
from .hf_config import HfConfig, read_json
from .source import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MedusaCheckpoint", "is_medusa", "open_medusa"]

# The reference's name first; vLLM's converted checkpoints are named as models are.
_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "pytorch_model.bin",
)
_PREFIXES = ("medusa_heads.", "medusa_head.")
_BLOCK = (
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"),
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
)
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight")
_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def is_medusa(folder: Path) -> bool:
    """Whether a folder holds Medusa heads, by its files and its config."""
    if any((folder / file).is_file() for file in _FILES[:2]):
        return True
    config = folder / "config.json"
    if not config.is_file():
        return False
    raw = read_json(config)
    return raw.get("model_type") == "medusa" or "medusa_num_heads" in raw


@dataclass
class MedusaCheckpoint:
    """Heads whose shapes are known and whose weights are still to be read."""

    name: str
    config: _core.MedusaConfig
    dtype: str
    source: Source
    names: dict[str, str]
    """The checkpoint's name of each canonical tensor."""
    rows: NDArray[np.int64] | None
    """Rows of the projections to take; None: all of them."""

    def load(self) -> _core.MedusaHeads:
        """Packed heads. Raises LoadError."""
        builder = _core.MedusaBuilder(self.config, self.dtype)
        for name, theirs in self.names.items():
            array = self.source.read(theirs)
            if self.rows is not None and name.endswith("projection"):
                array = array[self.rows]
            kind = "bfloat16" if array.dtype == np.uint16 else "float32"
            try:
                builder.set(name, kind, np.ascontiguousarray(array))
            except InvalidArgumentError as error:
                raise LoadError(f"[{self.name}] {error}") from error
        return builder.build()

    def close(self) -> None:
        self.source.close()


def open_medusa(
    model: str | os.PathLike[str],
    *,
    vocab_size: int,
    hidden_size: int,
    target_dtype: str,
    dtype: str = "auto",
    num_heads: int | None = None,
) -> MedusaCheckpoint:
    """Open and check the heads of a folder or hub repository; no weight is read yet.

    `vocab_size` and `hidden_size` are the target's. `num_heads` takes the first so many. "auto" is
    float32 for a float32 target, else bfloat16. Raises LoadError where the checkpoint is not
    exactly a set of heads for such a target, InvalidArgumentError where it has fewer heads than
    asked for.
    """
    from .open import find_folder

    name = os.fspath(model)
    folder = find_folder(model, files=_FILES)
    cfg = HfConfig(read_json(folder / "config.json"))
    source = _open_source(name, folder)
    try:
        tensors = _stripped(source, name)
        heads = _Heads(name, tensors, source)
        heads.check_config(cfg, vocab_size, hidden_size)
        count = heads.count if num_heads is None else num_heads
        if count > heads.count:
            raise InvalidArgumentError(
                f"[num_heads] expected at most the {heads.count} heads of {name}, got {count}"
            )
        if dtype == "auto":
            own = ("float32", "float16")
            dtype = target_dtype if target_dtype in own else "bfloat16"
        config = _core.MedusaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=count,
            num_blocks=heads.blocks,
            outputs=heads.outputs,
            bias=heads.bias,
            shared_blocks=heads.shared_blocks,
            shared_projection=heads.shared_projection,
            logits_scale=heads.logits_scale,
            token_map=heads.token_map or [],
        )
        return MedusaCheckpoint(
            name=name,
            config=config,
            dtype=resolve_dtype(dtype, set()),
            source=source,
            names={one: heads.source_of(one) for one, _ in _core.medusa_tensors(config)},
            rows=heads.rows,
        )
    except BaseException:
        source.close()
        raise


def _open_source(name: str, folder: Path) -> Source:
    from .safetensors_files import SafetensorsSource
    from .torch_state import read_pickles

    for file in _FILES:
        path = folder / file
        if path.is_file():
            return (
                SafetensorsSource([path]) if path.suffix == ".safetensors" else read_pickles([path])
            )
    raise LoadError(f"[{name}] expected one of {', '.join(_FILES)}, got none")


def _stripped(source: Source, where: str) -> dict[str, str]:
    """The checkpoint's names by what they are without a prefix."""
    found: dict[str, str] = {}
    for name in source.entries:
        short = name
        for prefix in _PREFIXES:
            short = short.removeprefix(prefix)
        if short in found:
            raise LoadError(f"[{where}] expected {short} once, got {found[short]} and {name}")
        found[short] = name
    return found


def _layers(names: set[str]) -> list[str]:
    """The block numbers in vLLM's names."""
    return [match.group(2) for one in names if (match := _BLOCK[1].fullmatch(one))]


class _Heads:
    """What the tensors of a checkpoint say, and what a config may add."""

    def __init__(self, where: str, tensors: dict[str, str], source: Source) -> None:
        self.where, self.tensors, self.source = where, tensors, source
        self.logits_scale = 1.0
        self.token_map: list[int] | None = None
        self.rows: NDArray[np.int64] | None = None
        self.reference = not any(one.startswith(("blocks.", "lm_head")) for one in tensors)
        self._left = set(tensors)
        self._places: dict[str, str] = {}
        self._find_projections()
        self._find_blocks()
        self._find_map()
        if self._left:
            raise LoadError(f"[{where}] unexpected tensors {', '.join(sorted(self._left))}")

    def source_of(self, canonical: str) -> str:
        return self._places[canonical]

    def _wrong(self, text: str) -> LoadError:
        return LoadError(f"[{self.where}] {text}")

    def _matches(self, pattern: re.Pattern[str]) -> dict[tuple[str, ...], str]:
        found = {}
        for name in sorted(self._left):
            match = pattern.fullmatch(name)
            if match:
                found[match.groups()] = name
        self._left -= set(found.values())
        return found

    def _shape(self, short: str) -> tuple[int, ...]:
        entry = self.source.entries[self.tensors[short]]
        if entry.dtype not in self.source.loadable:
            raise self._wrong(f"{short}: expected floating point, got {entry.dtype}")
        return entry.shape

    def _once(self, found: Iterable[tuple[Any, str]]) -> dict[Any, str]:
        """Names by place. Raises LoadError where two have the same, as 0 and 00 have."""
        names: dict[Any, str] = {}
        for place, name in found:
            if place in names:
                raise self._wrong(f"expected one of {names[place]} and {name}, got both")
            names[place] = name
        return names

    def _find_projections(self) -> None:
        self.shared_projection = False
        self._indices: set[int] = set()
        if self.reference:
            found = self._once(
                ((int(i), int(j)), name) for (i, j), name in self._matches(_PROJECTION).items()
            )
            depths = sorted({j for _, j in found})
            if len(depths) > 1:
                raise self._wrong(
                    f"expected a projection behind the same number of blocks in every head, got "
                    f"{', '.join(sorted(found.values()))}"
                )
            self.blocks = depths[0] if depths else 0
            projections = {i: name for (i, _), name in found.items()}
        else:
            self.blocks = max((int(j) for j in _layers(self._left)), default=-1) + 1
            projections = self._once(
                (int(i), name) for (i,), name in self._matches(_LM_HEAD).items()
            )
            if "lm_head.weight" in self._left:
                if projections:
                    raise self._wrong("expected lm_head.weight or lm_heads.*, got both")
                self._left.discard("lm_head.weight")
                self.shared_projection = True
                projections = {0: "lm_head.weight"}
        if not projections:
            raise self._wrong(
                "expected Medusa heads ({i}.{n}.weight or lm_heads.{i}.weight), got none"
            )
        self._projections = projections
        shapes = {name: self._shape(name) for name in projections.values()}
        if len(set(shapes.values())) > 1 or any(len(one) != 2 for one in shapes.values()):
            raise self._wrong(f"expected projections of one shape [outputs, hidden], got {shapes}")
        self.outputs, self.hidden = next(iter(shapes.values()))

    def _find_blocks(self) -> None:
        found = self._once(
            ((int(i), int(j), kind), name)
            for pattern in _BLOCK
            for (i, j, kind), name in self._matches(pattern).items()
        )
        heads = {i for i, _, _ in found} | (
            set() if self.shared_projection else set(self._projections)
        )
        # One projection for several heads is the original output head, for all of them.
        self.first_of_all = False
        if not self.reference and list(self._projections) == [0] and len(heads) > 1:
            self.first_of_all = not self.shared_projection
            self.shared_projection = True
        if not heads:
            raise self._wrong(
                "expected residual blocks of Medusa heads ({i}.{n}.linear.weight or "
                f"blocks.{{i}}.layers.{{n}}.weight), got {', '.join(sorted(self.tensors)[:4])}, ..."
            )
        self.count = max(heads) + 1
        present = sorted({j for _, j, _ in found})
        if self.count > len(heads):
            raise self._wrong(
                f"expected heads 0 to {len(heads) - 1}, got {', '.join(map(str, sorted(heads)))}"
            )
        # The reference repeats one block object; a file may hold it once.
        self.shared_blocks = self.blocks > 1 and len(present) == 1
        if not self.shared_blocks and len(present) < self.blocks:
            absent = next(one for one in range(self.blocks) if one not in present)
            raise self._wrong(
                f"missing tensors {self._block_name(0, absent, 'weight')} and its like in every "
                f"head: expected {self.blocks} residual blocks, got {len(present)}"
            )
        places = present if self.shared_blocks else list(range(self.blocks))
        self.bias = any(kind == "bias" for _, _, kind in found)
        missing = []
        for head in range(self.count):
            for place, block in enumerate(places):
                for kind in ("weight", "bias") if self.bias else ("weight",):
                    canonical = f"heads.{head}.blocks.{place}" + (".bias" if kind == "bias" else "")
                    short = found.pop((head, block, kind), None)
                    if short is None:
                        missing.append(self._block_name(head, block, kind))
                        continue
                    self._places[canonical] = self.tensors[short]
                    wanted = (self.hidden,) if kind == "bias" else (self.hidden, self.hidden)
                    if self._shape(short) != wanted:
                        got = list(self._shape(short))
                        raise self._wrong(f"{short}: expected shape {list(wanted)}, got {got}")
            if not self.shared_projection:
                short = self._projections.get(head)
                if short is None:
                    missing.append(
                        f"{head}.{self.blocks}.weight"
                        if self.reference
                        else f"lm_heads.{head}.weight"
                    )
                else:
                    self._places[f"heads.{head}.projection"] = self.tensors[short]
        if self.shared_projection:
            self._places["projection"] = self.tensors[next(iter(self._projections.values()))]
        self._left |= set(found.values())
        if missing:
            left = ", ".join(sorted(self._left - {"token_map"})) or "none"
            raise self._wrong(f"missing tensors {', '.join(missing)}; unexpected tensors {left}")

    def _block_name(self, head: int, block: int, kind: str) -> str:
        if self.reference:
            return f"{head}.{block}.linear.{kind}"
        return f"blocks.{head}.layers.{block}.{kind}"

    def _find_map(self) -> None:
        if "token_map" not in self._left:
            return
        self._left.discard("token_map")
        name = self.tensors["token_map"]
        entry = self.source.entries[name]
        if len(entry.shape) != 1 or entry.dtype not in ("int64", "int32"):
            raise self._wrong(
                f"token_map: expected whole numbers, one an output, got {entry.dtype} "
                f"{list(entry.shape)}"
            )
        self.token_map = [int(one) for one in self.source.read(name)]

    def check_config(self, cfg: HfConfig, vocab_size: int, hidden_size: int) -> None:
        """Raise LoadError where config, tensors and target do not go together."""
        # How many heads there are the tensors say; the rest is the reference's bookkeeping.
        cfg.unused("medusa_num_heads", "num_heads", "max_paths", "topk", "version", "max_seq_len")
        cfg.unused("base_model_name_or_path", "num_lookahead_tokens")
        for key in ("medusa_num_layers", "num_hidden_layers"):
            if cfg.raw.get(key) is not None and cfg.integer(key) != self.blocks:
                raise self._wrong(
                    f"expected the {cfg.integer(key)} residual blocks of the config's {key}, got "
                    f"{self.blocks}"
                )
        cfg.unused("medusa_num_layers", "num_hidden_layers")
        for key, own in (("hidden_size", self.hidden), ("vocab_size", None)):
            if cfg.raw.get(key) is not None and own not in (None, cfg.integer(key)):
                raise self._wrong(f"expected the config's {key} {cfg.integer(key)}, got {own}")
        if self.hidden != hidden_size:
            raise self._wrong(
                f"expected heads for the target's hidden size of {hidden_size}, got {self.hidden}"
            )
        if cfg.raw.get("medusa_fc_bias") is not None:
            says = cfg.flag("medusa_fc_bias", False)
            if says != self.bias and self.blocks:
                raise self._wrong(
                    f"expected blocks {'with' if says else 'without'} biases, as medusa_fc_bias "
                    f"says, got {'some' if self.bias else 'none'}"
                )
        cfg.unused("medusa_fc_bias")
        if self.first_of_all and not cfg.flag("original_lm_head", False):
            raise self._wrong(
                f"missing tensors lm_heads.1.weight and on, or original_lm_head, which says that "
                f"lm_heads.0 serves all {self.count} heads"
            )
        if cfg.flag("original_lm_head", False) and not self.shared_projection and self.count > 1:
            raise self._wrong(
                "expected one lm_head for all heads, as original_lm_head says, got one each"
            )
        self.logits_scale = cfg.positive("logit_scale", 1.0)
        self._check_vocabulary(cfg, vocab_size)
        cfg.finish()

    def _check_vocabulary(self, cfg: HfConfig, vocab_size: int) -> None:
        own = cfg.integer("vocab_size", vocab_size)
        kept = cfg.integer("truncated_vocab_size", own)
        if self.token_map is None:
            if kept < own:
                raise self._wrong(
                    f"expected a token_map for truncated_vocab_size {kept} of {own}, got none"
                )
        else:
            size = len(self.token_map)
            if size == 0:
                raise self._wrong("token_map: expected at least one token, got none")
            if "truncated_vocab_size" in cfg.raw and kept != size:
                raise self._wrong(
                    f"expected a token_map of truncated_vocab_size {kept} tokens, got {size}"
                )
            if len(set(self.token_map)) != size or not all(
                0 <= one < vocab_size for one in self.token_map
            ):
                raise self._wrong(
                    f"token_map: expected different tokens in [0, {vocab_size}), got others"
                )
            if self.outputs > size:  # whole projections, of which the map's rows count
                if max(self.token_map) >= self.outputs:
                    raise self._wrong(
                        f"token_map: expected rows of the projections' {self.outputs}, got "
                        f"{max(self.token_map)}"
                    )
                self.rows = np.asarray(self.token_map, dtype=np.int64)
                self.outputs = size
            if self.outputs != size:
                raise self._wrong(f"expected {size} outputs for token_map, got {self.outputs}")
        if self.outputs > vocab_size:
            raise self._wrong(
                f"expected heads for the target's vocabulary of {vocab_size}, got {self.outputs} "
                "outputs"
            )
