"""What an engine is put together from, beside its target: the drafter and what has to fit it."""

from __future__ import annotations

import warnings
from typing import Any

from . import _core
from .drafters import AnyDrafter, Drafter, DraftModel, Merge, NGram, Suffix
from .errors import InvalidArgumentError, UnsupportedError
from .loaded import Opened, open_target
from .planning import Sizes
from .text import VocabularyMap, map_vocabulary

__all__ = [
    "POLICIES",
    "OwnDrafter",
    "check_full_drafts",
    "check_options",
    "draft_tokens_of",
    "make_drafter",
    "open_draft",
    "vocabulary_map",
]


POLICIES = {"brake": _core.plan_braked, "fixed": _core.plan_fixed}
"""How many draft tokens each request gets in a round."""


def check_options(
    *, device: Any, verification: Any, policy: Any, cpu_isa: Any, **flags: Any
) -> str:
    """The instruction-set level to run. Raises as `Engine` does."""
    if device not in ("auto", "cpu"):
        if isinstance(device, str) and (device == "cuda" or device.startswith("cuda:")):
            raise UnsupportedError("[device] this build has no CUDA: use device='cpu'")
        raise InvalidArgumentError(f"[device] expected 'auto' or 'cpu', got {device!r}")
    if verification not in ("coupled", "rejection", "block"):
        if verification == "typical":
            raise UnsupportedError("[verification] 'typical' is not available yet")
        raise InvalidArgumentError(
            f"[verification] expected 'coupled', 'rejection' or 'block', got {verification!r}"
        )
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InvalidArgumentError(f"[policy] expected 'brake' or 'fixed', got {policy!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidArgumentError(f"[{name}] expected True or False, got {flag!r}")
    if not isinstance(cpu_isa, str):
        raise InvalidArgumentError(f"[cpu_isa] expected a level's name, got {cpu_isa!r}")
    return _core.resolve_cpu_isa(cpu_isa)


def draft_tokens_of(spec: AnyDrafter | None, asked: Any) -> int:
    """Draft tokens a round: as asked, else the drafter's own."""
    if asked is None:
        asked = spec.num_speculative_tokens if spec is not None else None
    tokens = 0 if asked is None else asked
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 2**63:
        raise InvalidArgumentError(
            f"[num_speculative_tokens] expected an integer >= 0, got {tokens!r}"
        )
    if spec is None and tokens:
        raise InvalidArgumentError(
            "[num_speculative_tokens] expected a drafter to go with it, got None"
        )
    return tokens


def open_draft(spec: DraftModel, target: Opened, max_model_len: int | None) -> Opened:
    """A draft model's checkpoint. Raises as `open_target` does."""
    # Rope factors of some families depend on the length: the target's, where both can.
    own_limit = target.shape.config.max_position_embeddings
    return open_target(
        spec.model,
        tokenizer=spec.tokenizer,
        dtype=spec.dtype,
        max_model_len=min(max_model_len or own_limit, own_limit),
    )


def check_full_drafts(sizes: Sizes, draft_tokens: int) -> None:
    """A draft that a full pass cuts short would change the text that a seed gives."""
    need = sizes.max_batch_size + -(-4 * sizes.max_batch_size * draft_tokens // 3)
    if sizes.max_num_batched_tokens < need:
        raise InvalidArgumentError(
            f"[max_num_batched_tokens] expected at least {need}, so that {sizes.max_batch_size} "
            f"requests always get {draft_tokens} draft tokens each, as verification 'rejection' "
            f"and 'block' need to repeat; got {sizes.max_num_batched_tokens}"
        )


def vocabulary_map(target: Opened, draft: Opened) -> VocabularyMap | None:
    """None where both have the same tokens under the same ids.

    Raises InvalidArgumentError where nothing is shared, or where that cannot be known.
    """
    sizes = (target.shape.config.vocab_size, draft.shape.config.vocab_size)
    if target.tokenizer is None or draft.tokenizer is None:
        if sizes[0] == sizes[1]:
            return None
        raise InvalidArgumentError(
            f"[drafter] expected a draft model with the target's vocabulary of {sizes[0]} tokens, "
            f"got one of {sizes[1]}: without both tokenizers the sizes must be equal"
        )
    difference = target.tokenizer.same_vocabulary(draft.tokenizer)
    own = (target.tokenizer.vocab_size, draft.tokenizer.vocab_size)
    if difference is None and own[0] != own[1]:
        difference = f"the tokenizers know {own[0]} and {own[1]} tokens"
    if difference is None:
        return None
    mapped = map_vocabulary(target.tokenizer, draft.tokenizer, sizes[0])
    if mapped.shared == 0:
        raise InvalidArgumentError(
            f"[drafter] expected a draft model that shares tokens with the target's vocabulary of "
            f"{sizes[0]}, got one of {sizes[1]} that shares none: {difference}"
        )
    warnings.warn(
        f"the draft model has another vocabulary ({difference}); it drafts only the "
        f"{mapped.shared} of {sizes[0]} target tokens that it knows",
        stacklevel=3,
    )
    return mapped


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

    def for_request(self) -> _core.CoreDrafter:
        return self._shared if self._shared is not None else self._make()

    @property
    def memory(self) -> list[_core.MemoryUse]:
        """Of each part."""
        if self._shared is not None:
            return [self._shared.memory]
        return [part.memory for part in self._parts if not isinstance(part, Drafter)]


def make_drafter(
    spec: AnyDrafter | None,
    draft_model: _core.Model | None,
    vocabulary: VocabularyMap | None,
    target: Opened,
    sizes: Sizes,
    team: _core.ThreadTeam,
    isa: str,
    check_invariants: bool,
    target_bytes: int,
) -> OwnDrafter | None:
    if spec is None:
        return None
    vocab_size = target.shape.config.vocab_size

    def make(part: AnyDrafter) -> _core.CoreDrafter | Drafter:
        if isinstance(part, NGram):
            return _core.make_ngram_drafter(
                min_match=part.prompt_lookup_min,
                max_match=part.prompt_lookup_max,
                most_recent=part.most_recent,
                num_candidates=part.num_candidates,
            )
        if isinstance(part, Suffix):
            return _make_suffix(part, vocab_size)
        if isinstance(part, DraftModel):
            assert draft_model is not None
            return _core.make_model_drafter(
                draft_model,
                target_vocab_size=vocab_size,
                **sizes.options(sizes.drafter_kv_cache_bytes, sizes.drafter_max_model_len),
                vocabulary=(
                    None if vocabulary is None else (vocabulary.draft_of_target, vocabulary.pieces)
                ),
                team=team,
                cpu_isa=isa,
                check_invariants=check_invariants,
            )
        assert isinstance(part, Drafter)
        return part

    merged = isinstance(spec, Merge)
    parts = spec.parts if isinstance(spec, Merge) else [spec]
    return OwnDrafter([make(part) for part in parts], merged, target_bytes)


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
