"""What an engine is put together from, beside its target: the drafter and what has to fit it."""

from __future__ import annotations

import warnings

from . import _core
from .drafters import AnyDrafter, DraftModel, NGram
from .errors import InvalidArgumentError
from .loaded import Opened
from .planning import Sizes
from .text import VocabularyMap, map_vocabulary

__all__ = ["check_full_drafts", "make_drafter", "vocabulary_map"]


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


def make_drafter(
    spec: AnyDrafter | None,
    draft_model: _core.Model | None,
    vocabulary: VocabularyMap | None,
    target: Opened,
    sizes: Sizes,
    team: _core.ThreadTeam,
    isa: str,
    check_invariants: bool,
) -> _core.CoreDrafter | None:
    if spec is None:
        return None
    if isinstance(spec, NGram):
        return _core.make_ngram_drafter(
            min_match=spec.prompt_lookup_min,
            max_match=spec.prompt_lookup_max,
            most_recent=spec.most_recent,
        )
    if isinstance(spec, DraftModel):
        assert draft_model is not None
        return _core.make_model_drafter(
            draft_model,
            target_vocab_size=target.shape.config.vocab_size,
            **sizes.options(sizes.drafter_kv_cache_bytes, sizes.drafter_max_model_len),
            vocabulary=(
                None if vocabulary is None else (vocabulary.draft_of_target, vocabulary.pieces)
            ),
            team=team,
            cpu_isa=isa,
            check_invariants=check_invariants,
        )
    return _core.make_python_drafter(spec)
