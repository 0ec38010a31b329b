"""What an engine is put together from, beside its target: the drafter and what has to fit it."""

from __future__ import annotations

import warnings
from typing import Any

from . import _core
from ._core import StaticTree
from .drafters import AnyDrafter, Drafter, DraftModel
from .errors import InvalidArgumentError
from .loaded import Opened, open_target
from .planning import Sizes, resolve_device
from .speculation import POLICIES, VERIFICATIONS, check_name
from .text import VocabularyMap, map_vocabulary

__all__ = [
    "check_full_drafts",
    "check_options",
    "check_tree",
    "draft_tokens_of",
    "open_draft",
    "vocabulary_map",
]


def check_options(
    *, device: Any, verification: Any, policy: Any, cpu_isa: Any, **flags: Any
) -> tuple[str, str]:
    """Device and instruction-set level to run. Raises as `Engine` does."""
    on = resolve_device(device)
    check_name("verification", verification, VERIFICATIONS)
    check_name("policy", policy, POLICIES)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidArgumentError(f"[{name}] expected True or False, got {flag!r}")
    if not isinstance(cpu_isa, str) or not cpu_isa.isascii():
        raise InvalidArgumentError(f"[cpu_isa] expected a level's name, got {cpu_isa!r}")
    return on, _core.resolve_cpu_isa(cpu_isa)


def draft_tokens_of(spec: AnyDrafter | None, asked: Any, tree: StaticTree | None = None) -> int:
    """Draft tokens a round: as asked, else the drafter's own, else all nodes of its tree."""
    if asked is None:
        asked = spec.num_speculative_tokens if spec is not None else None
        if asked is None and isinstance(spec, Drafter):
            raise InvalidArgumentError(
                "[num_speculative_tokens] expected an integer >= 0 of the drafter, got None"
            )
    if tree is not None:
        return len(tree) if asked is None else min(asked, len(tree))
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


def check_tree(tree: StaticTree, verification: str) -> None:
    """Block verification looks at chains alone."""
    if verification == "block" and not tree.is_chain:
        raise InvalidArgumentError(
            f"[tree] expected 'chain' with verification 'block', got a tree of {len(tree)} nodes "
            f"and {tree.depth} levels"
        )


def check_full_drafts(sizes: Sizes, draft_tokens: int, verification: str) -> None:
    """A draft that a full pass cuts short would change the text that a seed gives."""
    need = sizes.max_batch_size + -(-4 * sizes.max_batch_size * draft_tokens // 3)
    if sizes.max_num_batched_tokens < need:
        raise InvalidArgumentError(
            f"[max_num_batched_tokens] expected at least {need}, so that {sizes.max_batch_size} "
            f"requests always get {draft_tokens} draft tokens each, as verification "
            f"{verification!r} needs to repeat; got {sizes.max_num_batched_tokens}"
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
