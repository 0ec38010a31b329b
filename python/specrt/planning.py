"""Memory: known before it is taken, and told as it was taken."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from .drafters import MTP, AnyDrafter, DraftModel, Eagle, Medusa, SelfDraft, model_part_of, resolve
from .errors import CapacityError, InvalidArgumentError, LoadError, UnsupportedError
from .loading import Checkpoint, ModelFields, open_checkpoint
from .loading.checkpoint import resolve_dtype
from .system import available_memory

if TYPE_CHECKING:
    from .loading.medusa import MedusaCheckpoint

__all__ = ["MemoryPlan", "Sizes", "core_config", "plan", "plan_sizes"]

SAVED_SUFFIX = ".specrt"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by owner and purpose."""

    target_weights: int
    target_kv_cache: int
    target_workspace: int
    drafter_weights: int
    drafter_kv_cache: int
    drafter_workspace: int
    drafter_index: int
    """Indexes of lookups; grows with the texts and is 0 in a plan."""
    kv_cache_tokens: int
    """Tokens that the KV cache holds, all sequences together (a number, not bytes)."""

    @property
    def kv_cache(self) -> int:
        """Target's and drafter's together: what `kv_cache_bytes` bounds."""
        return self.target_kv_cache + self.drafter_kv_cache

    @property
    def total(self) -> int:
        return (
            self.target_weights
            + self.target_kv_cache
            + self.target_workspace
            + self.drafter_weights
            + self.drafter_kv_cache
            + self.drafter_workspace
            + self.drafter_index
        )

    def __str__(self) -> str:
        def mb(value: int) -> str:
            return f"{value / 1e6:,.1f} MB"

        return (
            f"weights {mb(self.target_weights)} + {mb(self.drafter_weights)} drafter · "
            f"KV cache {mb(self.target_kv_cache)} + {mb(self.drafter_kv_cache)} drafter "
            f"({self.kv_cache_tokens:,} tokens) · "
            f"workspace {mb(self.target_workspace + self.drafter_workspace)} · "
            f"total {mb(self.total)}"
        )


@dataclass(frozen=True, kw_only=True)
class Features:
    """The target's hidden states that a drafter reads, as `specrt::TargetFeatures` has them."""

    layers: tuple[int, ...] = ()
    """The residual stream as it enters these layers; num_layers: as it leaves the last."""
    normed: bool = False
    """And the final norm's output."""

    @property
    def any(self) -> bool:
        return self.normed or bool(self.layers)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the core's functions."""
        return {"feature_layers": list(self.layers), "feature_normed": self.normed}


MEDUSA_FEATURES = Features(normed=True)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Settings that decide how much memory an engine takes."""

    max_model_len: int
    max_batch_size: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_dtype: str
    enable_prefix_caching: bool
    target_kv_cache_bytes: int
    drafter_kv_cache_bytes: int
    drafter_max_model_len: int
    features: Features = Features()
    device: str = "cpu"
    """Or "cuda:N"."""

    def target_options(self) -> dict[str, Any]:
        """Keyword arguments of the core's functions, for the target."""
        return {
            **self.options(self.target_kv_cache_bytes, self.max_model_len),
            **self.features.options(),
            "device": self.device,
        }

    def options(self, kv_cache_bytes: int, max_model_len: int) -> dict[str, Any]:
        """Keyword arguments of the core's functions."""
        return {
            "kv_cache_bytes": kv_cache_bytes,
            "max_model_len": max_model_len,
            "max_batch_size": self.max_batch_size,
            "max_rows": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "enable_prefix_caching": self.enable_prefix_caching,
        }


@dataclass(frozen=True)
class ModelShape:
    """What sizes depend on: a config and a precision."""

    config: _core.ModelConfig
    dtype: str
    own_weights: int | None = None
    """Bytes, where it shares some with another model; None: all that its config has."""


@dataclass(frozen=True)
class HeadShape:
    """What the sizes of a draft head depend on."""

    config: _core.ModelConfig
    dtype: str
    features: Features
    levels: int
    top_k: int
    modules: int
    """The k-th drafts the k-th token."""
    target_of_draft: tuple[int, ...]

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the core's functions beside `Sizes.options`."""
        return {
            **self.features.options(),
            "depth": self.levels,
            "top_k": self.top_k,
            "modules": self.modules,
        }


DrafterShape = ModelShape | HeadShape


def core_config(fields: ModelFields, eos_token_ids: tuple[int, ...]) -> _core.ModelConfig:
    """The loader's fields as the core's config."""
    return _core.ModelConfig(**vars(fields), eos_token_ids=list(eos_token_ids))


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    return ModelShape(core_config(checkpoint.config, checkpoint.eos_token_ids), checkpoint.dtype)


def check_positive(**values: int | None) -> None:
    """Each given value is an integer >= 1."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got {value!r}")
        if value >= 2**63 or (name in _INT32 and value >= 2**31):
            raise InvalidArgumentError(f"[{name}] expected a smaller number, got {value}")


_INT32 = ("max_batch_size", "max_num_batched_tokens", "block_size", "threads")


def plan_sizes(
    target: ModelShape,
    drafter: DrafterShape | None,
    *,
    max_model_len: int | None,
    kv_cache_bytes: int | None,
    max_batch_size: int,
    max_num_batched_tokens: int,
    block_size: int,
    kv_cache_dtype: str,
    enable_prefix_caching: bool,
    features: Features | None = None,
    device: str = "cpu",
) -> Sizes:
    """Split `kv_cache_bytes` so that target and draft model hold the same number of tokens.

    Without `kv_cache_bytes`: enough for every sequence at full length, at most a quarter of the
    memory that is available. More than that is taken only for prefix caching. Raises
    InvalidArgumentError and CapacityError with the numbers.
    """
    for name, value in (
        ("max_batch_size", max_batch_size),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("block_size", block_size),
    ):
        if value is None:
            raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got None")
    check_positive(
        max_model_len=max_model_len,
        kv_cache_bytes=kv_cache_bytes,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
    )
    if not max_batch_size <= max_num_batched_tokens <= 65536:
        raise InvalidArgumentError(
            f"[max_num_batched_tokens] expected from max_batch_size = {max_batch_size} to 65536, "
            f"got {max_num_batched_tokens}"
        )
    longest = target.config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise InvalidArgumentError(
            f"[max_model_len] expected at most the model's {longest}, got {max_model_len}"
        )
    if not isinstance(kv_cache_dtype, str) or not kv_cache_dtype.isascii():
        raise InvalidArgumentError(f"[kv_cache_dtype] expected a name, got {kv_cache_dtype!r}")
    _core.resolve_kv_cache_dtype(kv_cache_dtype, target.dtype)
    length = longest if max_model_len is None else max_model_len
    drafter_length = 0
    if drafter is not None:
        drafter_length = min(length, drafter.config.max_position_embeddings)

    def needed(model: DrafterShape | None, model_length: int, blocks: int) -> int:
        if model is None:
            return 0
        options: dict[str, Any] = {
            "max_model_len": model_length,
            "max_batch_size": max_batch_size,
            "max_rows": max_num_batched_tokens,
            "block_size": block_size,
            "kv_cache_dtype": kv_cache_dtype,
            "enable_prefix_caching": enable_prefix_caching,
            "sequences": 1,
            "tokens": blocks * block_size,
        }
        if isinstance(model, HeadShape):
            return _core.head_kv_cache_bytes_for(
                model.config, model.dtype, **options, **model.options()
            )
        return _core.kv_cache_bytes_for(model.config, model.dtype, **options)

    def both(blocks: int) -> int:
        return needed(target, length, blocks) + needed(drafter, drafter_length, blocks)

    scratch, block = both(0), both(1) - both(0)
    most = -(-length // block_size) * max_batch_size
    budget = kv_cache_bytes
    if budget is None:
        room = room_on(device)
        budget = both(most) if room is None else min(both(most), max(room // 4, both(1)))
    elif enable_prefix_caching:
        most += budget // block
    blocks = _most_blocks(both, most, budget)
    if blocks < 1:
        raise CapacityError(
            f"[kv_cache_bytes] expected at least {scratch + block} (scratch slots for "
            f"{max_num_batched_tokens} rows and one block), got {budget}"
        )
    return Sizes(
        max_model_len=length,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=enable_prefix_caching,
        target_kv_cache_bytes=needed(target, length, blocks),
        drafter_kv_cache_bytes=needed(drafter, drafter_length, blocks),
        drafter_max_model_len=drafter_length,
        features=features or Features(),
        device=device,
    )


def resolve_device(device: Any) -> str:
    """ "cpu" or "cuda:N". Raises InvalidArgumentError for a name that is none, or no GPU's here.

    Raises UnsupportedError with what stands in the way of a GPU. "auto" is the CPU: nothing of the
    CUDA side has been proved on hardware.
    """
    name = device if isinstance(device, str) else ""
    if name in ("auto", "cpu"):
        return "cpu"
    named = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", name)
    if named is None:
        raise InvalidArgumentError(
            f"[device] expected 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}"
        )
    found = _core.cuda_devices()  # raises where the build has no CUDA
    if not found:
        raise UnsupportedError(f"[device] expected an NVIDIA GPU for {device!r}, got none here")
    number = int(named[1] or 0)
    if number >= len(found):
        raise InvalidArgumentError(f"[device] expected one of {len(found)} GPUs, got {device!r}")
    return f"cuda:{number}"


def room_on(device: str) -> int | None:
    """Bytes that may still be taken of a device's memory; None where nobody says."""
    if device == "cpu":
        return available_memory()
    return _core.cuda_free_memory(int(device.removeprefix("cuda:")))


def _most_blocks(needed: Callable[[int], int], most: int, budget: int) -> int:
    """The largest number of blocks, at most `most`, that needs no more than `budget` bytes."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if needed(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def self_draft_shape(spec: SelfDraft, target: ModelShape) -> ModelShape | None:
    """The model that drafts; None where it is the target itself, less some layers.

    Raises InvalidArgumentError where it is no cheaper than the target.
    """
    precision, layers = spec.precision, spec.layers
    if precision is None:
        precision = "int4" if layers is None else target.dtype
    precision = resolve_dtype(precision, set())
    if layers is None:
        layers = target.config.num_layers
    config = _core.self_draft_config(target.config, target.dtype, precision, layers)
    if precision == target.dtype:
        return None
    weights = _core.self_draft_bytes(target.config, target.dtype, precision, layers)
    return ModelShape(config, precision, weights)


def layers_use(spec: AnyDrafter | None, target: ModelShape) -> _core.MemoryUse | None:
    """What a drafter takes that is the target's first layers; None for any other."""
    if isinstance(spec, SelfDraft) and self_draft_shape(spec, target) is None:
        return _core.memory_of_layers_drafter(target.config)
    return None


def medusa_use(checkpoint: MedusaCheckpoint, max_batch_size: int, device: str) -> _core.MemoryUse:
    """What Medusa heads take."""
    return _core.memory_of_medusa(
        checkpoint.config, checkpoint.dtype, max_batch_size=max_batch_size, device=device
    )


def plan_memory(
    target: ModelShape,
    drafter: DrafterShape | None,
    sizes: Sizes,
    fixed: _core.MemoryUse | None = None,
) -> MemoryPlan:
    """The shares of an engine of these sizes. `fixed` is a drafter's that is no model."""
    own = _core.memory_of(
        target.config,
        target.dtype,
        **sizes.target_options(),
    )
    other = fixed
    if drafter is not None:
        options = sizes.options(sizes.drafter_kv_cache_bytes, sizes.drafter_max_model_len)
        if isinstance(drafter, HeadShape):
            other = _core.head_memory_of(
                drafter.config,
                drafter.dtype,
                target_vocab_size=target.config.vocab_size,
                target_of_draft=list(drafter.target_of_draft),
                **options,
                **drafter.options(),
                device=sizes.device,
            )
        else:
            other = _core.memory_of_draft_model(
                drafter.config,
                drafter.dtype,
                target_vocab_size=target.config.vocab_size,
                **options,
                device=sizes.device,
            )
    weights = other.weights if other else 0
    # A GPU has them all anew.
    shares = sizes.device == "cpu"
    if isinstance(drafter, ModelShape) and drafter.own_weights is not None and shares:
        weights = drafter.own_weights
    return MemoryPlan(
        target_weights=own.weights,
        target_kv_cache=own.kv_cache,
        target_workspace=own.workspace,
        drafter_weights=weights,
        drafter_kv_cache=other.kv_cache if other else 0,
        drafter_workspace=other.workspace if other else 0,
        drafter_index=0,
        kv_cache_tokens=cache_tokens(target, sizes),
    )


def cache_tokens(target: ModelShape, sizes: Sizes) -> int:
    """Tokens that the target's KV cache holds."""

    def needed(tokens: int) -> int:
        return _core.kv_cache_bytes_for(
            target.config,
            target.dtype,
            max_model_len=sizes.max_model_len,
            max_batch_size=sizes.max_batch_size,
            max_rows=sizes.max_num_batched_tokens,
            block_size=sizes.block_size,
            kv_cache_dtype=sizes.kv_cache_dtype,
            enable_prefix_caching=sizes.enable_prefix_caching,
            sequences=1,
            tokens=tokens,
        )

    block = needed(sizes.block_size) - needed(0)
    return (sizes.target_kv_cache_bytes - needed(0)) // block * sizes.block_size


def check_room(wanted: MemoryPlan, device: str = "cpu") -> None:
    """Raise CapacityError where weights and workspace cannot fit into what is available."""
    room = room_on(device)
    need = wanted.total
    if room is not None and need > room:
        raise CapacityError(
            f"[memory] expected at most the {room} bytes that are available, got a need of {need}: "
            f"{wanted}"
        )


def plan(
    target: Any,
    drafter: Any = None,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    max_batch_size: int = 32,
    max_num_batched_tokens: int = 512,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    enable_prefix_caching: bool = True,
    num_speculative_tokens: int | None = None,
    device: str = "auto",
) -> MemoryPlan:
    """What `Engine` with the same arguments takes, from headers alone; no weight is read.

    With device "cuda" it is the GPU's memory.
    """
    from .assembly import draft_tokens_of
    from .heads import open_head

    device = resolve_device(device)
    whole = resolve(drafter)
    draft_tokens_of(whole, num_speculative_tokens)  # checks it
    spec = model_part_of(whole)
    check_positive(max_model_len=max_model_len)
    drafter_shape: DrafterShape | None = None
    features = Features()
    if isinstance(spec, (Eagle, MTP)):
        merged, tokens = whole is not spec, num_speculative_tokens
        if merged and tokens is None and whole is not None:
            tokens = whole.num_speculative_tokens
        shape, checkpoint = open_shape(target, dtype, max_model_len)
        try:
            opening = open_head(spec, shape, checkpoint, tokens, max_model_len, merged)
            with closing(opening) as head:
                drafter_shape, features = head.shape, head.shape.features
        finally:
            if checkpoint is not None:
                checkpoint.close()
    else:
        shape = _shape_at(target, dtype, max_model_len)
    if isinstance(spec, DraftModel):
        drafter_shape = _shape_at(spec.model, spec.dtype, None)
    elif isinstance(spec, SelfDraft):
        drafter_shape = self_draft_shape(spec, shape)
    fixed = layers_use(spec, shape)
    if isinstance(spec, Medusa):
        heads, _ = spec.open(shape.config, shape.dtype)
        heads.close()
        check_positive(max_batch_size=max_batch_size)
        fixed = medusa_use(heads, max_batch_size, device)
        features = MEDUSA_FEATURES
    sizes = plan_sizes(
        shape,
        drafter_shape,
        max_model_len=max_model_len,
        kv_cache_bytes=kv_cache_bytes,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=enable_prefix_caching,
        features=features,
        device=device,
    )
    return plan_memory(shape, drafter_shape, sizes, fixed)


def map_saved(target: Any, dtype: str) -> _core.Model | None:
    """A file that `Engine.save` wrote, mapped; None where the target is something else.

    Raises LoadError where the file is damaged or of another precision.
    """
    if not isinstance(target, (str, os.PathLike)):
        return None
    name = os.fspath(target)
    if not name.endswith(SAVED_SUFFIX) or not os.path.isfile(name):
        return None
    model = _core.Model.map(name)
    if dtype != "auto" and resolve_dtype(dtype, set()) != model.dtype:
        raise LoadError(f"[{name}] expected dtype {dtype}, got a file of {model.dtype}")
    return model


def open_shape(
    target: Any, dtype: str, max_model_len: int | None
) -> tuple[ModelShape, Checkpoint | None]:
    """A target's shape, and its checkpoint where it is not a saved file."""
    saved = map_saved(target, dtype)
    if saved is not None:
        return ModelShape(saved.config, saved.dtype), None
    checkpoint = open_checkpoint(target, dtype=dtype, max_model_len=max_model_len)
    return shape_of(checkpoint), checkpoint


def _shape_at(target: Any, dtype: str, max_model_len: int | None) -> ModelShape:
    saved = map_saved(target, dtype)
    if saved is not None:
        return ModelShape(saved.config, saved.dtype)
    with open_checkpoint(target, dtype=dtype, max_model_len=max_model_len) as checkpoint:
        return shape_of(checkpoint)
