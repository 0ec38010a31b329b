"""What an engine drafts with: from a description to the core, one class for each way there.

A part is made in four steps, as the engine is: opened (headers alone, which tells its memory),
loaded, made over the target's weights, closed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import _core
from .assembly import check_tree, draft_tokens_of, open_draft, vocabulary_map
from .drafters import (
    MTP,
    AnyDrafter,
    Drafter,
    DraftModel,
    Eagle,
    Medusa,
    Merge,
    NGram,
    SelfDraft,
    Suffix,
    Synthetic,
)
from .heads import open_head
from .planning import (
    MEDUSA_FEATURES,
    DrafterShape,
    Features,
    Sizes,
    check_positive,
    layers_use,
    medusa_use,
    self_draft_shape,
)

if TYPE_CHECKING:
    from .loaded import Opened

__all__ = ["Asked", "Frame", "OwnDrafter", "Parts", "open_parts"]


@dataclass(frozen=True)
class Asked:
    """The engine's arguments that drafters depend on."""

    draft_tokens: int | None
    max_model_len: int | None
    max_batch_size: int
    verification: str
    device: str = "cpu"
    merged: bool = False
    """`draft_tokens` are those of a `Merge`."""


@dataclass(frozen=True)
class Frame:
    """What the core's drafters are made in."""

    target: _core.Model
    opened: Opened
    sizes: Sizes
    team: _core.ThreadTeam
    isa: str
    check_invariants: bool

    def own_cache(self) -> dict[str, Any]:
        """Arguments of a drafter that has a KV cache of its own."""
        sizes = self.sizes
        return {
            **sizes.options(sizes.drafter_kv_cache_bytes, sizes.drafter_max_model_len),
            "team": self.team,
            "cpu_isa": self.isa,
            "device": self.sizes.device,
            "check_invariants": self.check_invariants,
        }


class Part:
    """Of nothing but the texts, or the user's own."""

    shape: DrafterShape | None = None
    """Of what has a KV cache of its own."""
    fixed: _core.MemoryUse | None = None
    """What it takes without one."""
    features = Features()
    most_draft_tokens: int | None = None
    """What a request may ask for, where its memory or shape is for so many."""
    tells_laws = False
    """Whether it can serve policy "adasd"."""

    def __init__(self, spec: AnyDrafter, asked: Asked) -> None:
        self.spec = spec
        self.draft_tokens = draft_tokens_of(spec, asked.draft_tokens)

    def load(self) -> None:
        """Read its weights, before the target's checkpoint is let go."""

    def make(self, frame: Frame) -> _core.CoreDrafter | Drafter:
        spec = self.spec
        if isinstance(spec, NGram):
            return _core.make_ngram_drafter(
                min_match=spec.prompt_lookup_min,
                max_match=spec.prompt_lookup_max,
                most_recent=spec.most_recent,
                num_candidates=spec.num_candidates,
            )
        if isinstance(spec, Synthetic):
            return _core.make_synthetic_drafter()
        if isinstance(spec, Suffix):
            return _make_suffix(spec, frame.opened.shape.config.vocab_size)
        assert isinstance(spec, Drafter)
        return spec

    def close(self) -> None:
        pass


class ModelPart(Part):
    """A smaller model."""

    def __init__(self, spec: DraftModel, opened: Opened, asked: Asked) -> None:
        super().__init__(spec, asked)
        self.opened = open_draft(spec, opened, asked.max_model_len)
        try:
            self.vocabulary = vocabulary_map(opened, self.opened)
        except BaseException:
            self.opened.close()
            raise
        self.shape = self.opened.shape
        self.tells_laws = self.vocabulary is None

    def load(self) -> None:
        self.model = self.opened.load()

    def make(self, frame: Frame) -> _core.CoreDrafter:
        known = self.vocabulary
        return _core.make_model_drafter(
            self.model,
            target_vocab_size=frame.opened.shape.config.vocab_size,
            vocabulary=None if known is None else (known.draft_of_target, known.pieces),
            **frame.own_cache(),
        )

    def close(self) -> None:
        self.opened.close()


class SelfPart(Part):
    """The target itself."""

    tells_laws = True

    def __init__(self, spec: SelfDraft, opened: Opened, asked: Asked) -> None:
        super().__init__(spec, asked)
        self.layers = spec.layers
        self.rounded = self_draft_shape(spec, opened.shape)
        self.shape = self.rounded
        self.fixed = layers_use(spec, opened.shape)

    def make(self, frame: Frame) -> _core.CoreDrafter:
        if self.rounded is None:
            assert self.layers is not None
            return _core.make_layers_drafter(frame.target, layers=self.layers, cpu_isa=frame.isa)
        return _core.make_model_drafter(
            _core.make_self_draft(frame.target, self.rounded.dtype, self.rounded.config.num_layers),
            target_vocab_size=frame.opened.shape.config.vocab_size,
            vocabulary=None,
            **frame.own_cache(),
        )


class HeadPart(Part):
    """A head of EAGLE's, or the target's own module."""

    def __init__(self, spec: Eagle | MTP, opened: Opened, asked: Asked) -> None:
        super().__init__(spec, asked)
        self.head = open_head(
            spec,
            opened.shape,
            opened.checkpoint,
            asked.draft_tokens,
            asked.max_model_len,
            asked.merged,
        )
        self.draft_tokens = self.head.draft_tokens
        self.shape = self.head.shape
        self.features = self.head.shape.features
        self.most_draft_tokens = self.draft_tokens

    def load(self) -> None:
        self.model = self.head.load()

    def make(self, frame: Frame) -> _core.CoreDrafter:
        return self.head.drafter(
            self.model, frame.target, frame.sizes, frame.team, frame.isa, frame.check_invariants
        )

    def close(self) -> None:
        self.head.close()


class MedusaPart(Part):
    """Medusa's heads."""

    features = MEDUSA_FEATURES

    def __init__(self, spec: Medusa, opened: Opened, asked: Asked) -> None:
        super().__init__(spec, asked)
        check_positive(max_batch_size=asked.max_batch_size)
        self.checkpoint, self.tree = spec.open(opened.shape.config, opened.shape.dtype)
        try:
            check_tree(self.tree, asked.verification)
            self.draft_tokens = draft_tokens_of(spec, asked.draft_tokens, self.tree)
            self.most_draft_tokens = self.draft_tokens
            self.fixed = medusa_use(self.checkpoint, asked.max_batch_size, asked.device)
        except BaseException:
            self.checkpoint.close()
            raise

    def load(self) -> None:
        self.heads = self.checkpoint.load()

    def make(self, frame: Frame) -> _core.CoreDrafter:
        return _core.make_medusa_drafter(
            self.heads,
            tree=self.tree,
            max_batch_size=frame.sizes.max_batch_size,
            team=frame.team,
            cpu_isa=frame.isa,
            device=frame.sizes.device,
        )

    def close(self) -> None:
        self.checkpoint.close()


def _make_suffix(spec: Suffix, vocab_size: int) -> _core.CoreDrafter:
    cache = spec.cache
    if cache is None and spec.suffix_decoding_max_cached_requests > 0:
        cache = _core.SuffixCache(
            max_depth=spec.suffix_decoding_max_tree_depth,
            max_requests=spec.suffix_decoding_max_cached_requests,
            max_tokens=spec.suffix_decoding_max_cached_tokens,
        )
    if cache is not None:
        cache.set_vocabulary(vocab_size)
    return _core.make_suffix_drafter(
        max_tree_depth=spec.suffix_decoding_max_tree_depth,
        max_spec_factor=float(spec.suffix_decoding_max_spec_factor),
        max_spec_offset=float(spec.suffix_decoding_max_spec_offset),
        min_token_prob=float(spec.suffix_decoding_min_token_prob),
        use_tree_spec=spec.suffix_decoding_use_tree_spec,
        cache=cache,
    )


def _open_part(spec: AnyDrafter, opened: Opened, asked: Asked) -> Part:
    if isinstance(spec, DraftModel):
        return ModelPart(spec, opened, asked)
    if isinstance(spec, SelfDraft):
        return SelfPart(spec, opened, asked)
    if isinstance(spec, (Eagle, MTP)):
        return HeadPart(spec, opened, asked)
    if isinstance(spec, Medusa):
        return MedusaPart(spec, opened, asked)
    return Part(spec, asked)


class OwnDrafter:
    """An engine's drafter as its requests get it.

    A drafter in Python gets a wrapper for each request, to keep its errors apart, and so does a
    `Merge` that has one among its parts; all else is shared.
    """

    def __init__(
        self, parts: list[_core.CoreDrafter | Drafter], merged: bool, target_bytes: int
    ) -> None:
        self._parts = parts
        self._merged = merged
        self._target_bytes = target_bytes
        alone = not any(isinstance(part, Drafter) for part in parts)
        made = self._make()  # which also checks
        self._shared = made if alone else None

    def _make(self) -> _core.CoreDrafter:
        parts = [
            _core.make_python_drafter(part) if isinstance(part, Drafter) else part
            for part in self._parts
        ]
        if not self._merged:
            return parts[0]
        return _core.make_merge_drafter(parts, target_bytes=self._target_bytes)

    @property
    def measurable(self) -> _core.CoreDrafter | None:
        """What may be run on texts of no meaning; None where a part is the user's own."""
        return self._shared

    def for_request(self) -> _core.CoreDrafter:
        return self._shared if self._shared is not None else self._make()

    @property
    def memory(self) -> list[_core.MemoryUse]:
        """Of each part."""
        if self._shared is not None:
            return [self._shared.memory]
        return [part.memory for part in self._parts if not isinstance(part, Drafter)]


class Parts:
    """All parts of a drafter, opened: one, or those of a `Merge`, of which one may run a model."""

    def __init__(self, spec: AnyDrafter, parts: list[Part], draft_tokens: int) -> None:
        self._parts = parts
        self._merged = isinstance(spec, Merge)
        self.draft_tokens = draft_tokens
        self.shape = next((part.shape for part in parts if part.shape is not None), None)
        self.fixed = next((part.fixed for part in parts if part.fixed is not None), None)
        self.features = next((one.features for one in parts if one.features.any), Features())
        bounds = [one.most_draft_tokens for one in parts if one.most_draft_tokens is not None]
        self.most_draft_tokens = min(bounds) if bounds else None
        self.tells_laws = not self._merged and parts[0].tells_laws
        self.trees = [one.tree for one in parts if isinstance(one, MedusaPart)]

    def load(self) -> None:
        """Read weights, before the target's checkpoint is let go."""
        for part in self._parts:
            part.load()

    def make(self, frame: Frame, target_bytes: int) -> OwnDrafter:
        """`target_bytes`: of the target's weights, by which costs are measured."""
        return OwnDrafter([part.make(frame) for part in self._parts], self._merged, target_bytes)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def open_parts(spec: AnyDrafter, opened: Opened, asked: Asked) -> Parts:
    """Open and check a drafter for a target. Raises as `Engine` does."""
    if not isinstance(spec, Merge):
        part = _open_part(spec, opened, asked)
        return Parts(spec, [part], part.draft_tokens)
    tokens = draft_tokens_of(spec, asked.draft_tokens)
    parts: list[Part] = []
    try:
        for one in spec.parts:
            parts.append(_open_part(one, opened, replace(asked, draft_tokens=tokens, merged=True)))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return Parts(spec, parts, tokens)
