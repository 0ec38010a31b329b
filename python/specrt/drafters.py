"""Drafters: what proposes tokens.

Any of them may cost time; with `coupled` verification none can change the output.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ._core import DraftTree, SuffixCache
from .errors import InvalidArgumentError, LoadError
from .head_specs import MTP, Eagle, Eagle3, Medusa, tree_from_accuracies

__all__ = [
    "MTP",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Medusa",
    "Merge",
    "NGram",
    "SelfDraft",
    "Suffix",
    "SuffixCache",
    "Synthetic",
    "resolve",
    "tree_from_accuracies",
]


class Drafter(ABC):
    """Base of drafters written in Python: slower than the built-in ones, and as safe.

    class Repeat(specrt.Drafter):
        def propose(self, tokens, budget):
            return specrt.DraftTree.chain(tokens[-1:] * budget)
    """

    num_speculative_tokens: int = 4
    """The budget where the engine is given none."""
    step_cost: float = 0.0
    """What one more token of depth costs to draft, as a share of a pass of the target: the engine
    drafts less where that does not pay."""

    @abstractmethod
    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        """A draft of at most `budget` nodes that continues `tokens` (prompt and output so far).

        None or an empty tree drafts nothing. Nodes beyond the budget or the limits of the request
        are cut. An exception ends the request with an error and harms no other. With `rejection`
        and `block` verification, a draft that was sampled, not picked, has to tell the
        probabilities that it was drawn from (`DraftTree.set_distribution`).
        """

    def observe(self, committed: list[int]) -> None:
        """Called after each round with the tokens that the target chose for one request."""


@dataclass(frozen=True, kw_only=True)
class NGram:
    """Prompt lookup: what followed the longest earlier occurrence of the context's suffix.

    The suffix has `prompt_lookup_min` to `prompt_lookup_max` tokens; of several earlier
    occurrences the most recent one counts, or the first with `most_recent=False`. With
    `num_candidates` > 1 the draft is a tree of that many earlier continuations: a further one is
    what the same rule finds for the text up to the earlier occurrence. The first has at least three
    quarters of the nodes. (Saxena, "Prompt lookup decoding", 2023.)
    """

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4
    most_recent: bool = True
    num_candidates: int = 1
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        _check_integers(
            self,
            "prompt_lookup_min",
            "prompt_lookup_max",
            "num_candidates",
            "num_speculative_tokens",
        )
        _check_flags(self, "most_recent")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise InvalidArgumentError(
                f"[prompt_lookup_max] expected at least prompt_lookup_min = "
                f"{self.prompt_lookup_min}, got {self.prompt_lookup_max}"
            )


@dataclass(frozen=True, kw_only=True)
class Suffix:
    """Suffix decoding: what most often followed the context's suffix (arXiv 2411.04975).

    Looks in the request's own text and in earlier responses of the engine. A match of m tokens
    drafts at most m * `max_spec_factor` + `max_spec_offset`, and nothing whose estimated
    probability is below `min_token_prob`; of all matches the draft with the highest sum of
    probabilities counts, the longer match of equals, and the request's own text before others'.

    With verification "rejection" and "block", where a draft has a say in what is sampled, a sampled
    request looks in its own text alone: so a seed repeats its text whatever ran before.
    """

    suffix_decoding_max_tree_depth: int = 24
    """Bounds a match and its draft together."""
    suffix_decoding_max_cached_requests: int = 10000
    """Earlier responses to keep, the oldest go first; 0 keeps none."""
    suffix_decoding_max_cached_tokens: int = 2**18
    """Tokens of them, at about 100 bytes each."""
    suffix_decoding_max_spec_factor: float = 4.0
    """vLLM and Arctic have 1.0. Verifying a row more costs little here, so short matches may draft
    more; `Engine`'s policy sees to it where that fails."""
    suffix_decoding_max_spec_offset: float = 0.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_use_tree_spec: bool = False
    """Branches too, likeliest first, in place of the likeliest path."""
    cache: SuffixCache | None = None
    """Responses to share with other engines of the same vocabulary; its own limits hold, in place
    of the ones above."""
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        name = "suffix_decoding_"
        _check_integers(self, name + "max_tree_depth", "num_speculative_tokens")
        _check_integers(self, name + "max_cached_requests", name + "max_cached_tokens", least=0)
        _check_numbers(self, name + "max_spec_factor", least=0.0)
        _check_numbers(self, name + "max_spec_offset")
        _check_numbers(self, name + "min_token_prob", least=0.0, most=1.0)
        _check_flags(self, name + "use_tree_spec")
        if self.suffix_decoding_max_tree_depth > 4096:
            raise InvalidArgumentError(
                f"[{name}max_tree_depth] expected at most 4096, got "
                f"{self.suffix_decoding_max_tree_depth}"
            )
        if self.suffix_decoding_max_cached_tokens >= 2**29 - 2:
            raise InvalidArgumentError(
                f"[{name}max_cached_tokens] expected fewer than 2**29 - 2, got "
                f"{self.suffix_decoding_max_cached_tokens}"
            )
        if self.cache is None:
            return
        if not isinstance(self.cache, SuffixCache):
            raise InvalidArgumentError(
                f"[cache] expected a SuffixCache or None, got {type(self.cache).__name__}"
            )
        for limit in ("max_cached_requests", "max_cached_tokens"):
            if getattr(self, name + limit) != getattr(Suffix, name + limit):
                raise InvalidArgumentError(
                    f"[{name}{limit}] expected none beside a cache, which has limits of its own, "
                    f"got {getattr(self, name + limit)}"
                )
        if self.cache.max_depth != self.suffix_decoding_max_tree_depth:
            raise InvalidArgumentError(
                f"[cache] expected one of max_depth {self.suffix_decoding_max_tree_depth}, as "
                f"{name}max_tree_depth has it, got {self.cache.max_depth}"
            )


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Drafts the last token over and over, at no cost.

    For `Engine(synthetic_acceptance_rate=...)`, where it does not matter what is drafted: it shows
    what drafts of that quality would gain if they were free.
    """

    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        _check_integers(self, "num_speculative_tokens")


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A smaller model that drafts a chain (Leviathan et al., arXiv 2211.17192).

    Where its vocabulary is another one, it drafts only the tokens that both know.
    """

    model: Any
    """As `Engine`'s target: a folder, a hub id, a .gguf file or a transformers model."""
    tokenizer: Any = None
    """As `Engine`'s; None takes the one that comes with the model."""
    dtype: str = "auto"
    """As `Engine`'s; whatever it is, the target decides."""
    num_speculative_tokens: int = 4


@dataclass(frozen=True, kw_only=True)
class SelfDraft:
    """The target drafts for itself, cheaper: its first layers, a coarser precision, or both.

    `layers=k` runs the first k layers under the target's norm and head, in the target's own weights
    and KV cache (Zhang et al., arXiv 2309.08168): it takes nearly no memory. `precision` rounds
    the target's weights once more and drafts over a KV cache of its own; the embedding table and
    whatever else is the same in both is shared. Without either, `precision="int4"`.
    """

    precision: str | None = None
    """Coarser than the target's: "bfloat16", "int8", "int4" or "w8a8"; None with `layers` takes
    the target's."""
    layers: int | None = None
    """From 1 to one less than the target has; with a coarser `precision` all of them, too."""
    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        names = ("bfloat16", "bf16", "int8", "int4", "w8a8")
        if self.precision is not None and self.precision not in names:
            raise InvalidArgumentError(
                f"[precision] expected None, 'bfloat16', 'int8', 'int4' or 'w8a8', got "
                f"{self.precision!r}"
            )
        for name in ("layers", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is None and name == "layers":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class Merge:
    """Drafts of several drafters as one tree of the nodes most likely to be accepted.

    `parts` are what `Engine` takes as drafters, at most one of them a model or head. Each may
    propose `num_speculative_tokens` nodes, whatever its own number is. How likely a
    node is follows from how each part's drafts have fared in the same request. Parts that cost
    nothing are asked first, a model or head (or a Python drafter with a `step_cost`) only where
    what it may add is worth its cost. `Metrics.sources` tells what each part came to.

    With verification "rejection" and "block" a draft model drafts its most likely tokens here, for
    picked and sampled tokens do not merge; a part of your own that samples (tells distributions)
    ends the request with an error. With "block", the likeliest path is drafted.
    """

    parts: Sequence[Any]
    _: KW_ONLY
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        _check_integers(self, "num_speculative_tokens")
        if isinstance(self.parts, (str, bytes)) or not isinstance(self.parts, Sequence):
            raise InvalidArgumentError(
                f"[parts] expected a list of drafters, got {type(self.parts).__name__}"
            )
        parts = tuple(resolve(part) for part in self.parts)
        if not 1 <= len(parts) <= 32:
            raise InvalidArgumentError(f"[parts] expected 1 to 32 drafters, got {len(parts)}")
        for part in parts:
            if part is None or isinstance(part, Merge):
                raise InvalidArgumentError(f"[parts] expected drafters that draft, got {part!r}")
        models = sum(isinstance(part, _MODELS) for part in parts)
        if models > 1:
            raise InvalidArgumentError(f"[parts] expected at most one model or head, got {models}")
        object.__setattr__(self, "parts", parts)


AnyDrafter = (
    NGram
    | Suffix
    | Synthetic
    | DraftModel
    | SelfDraft
    | Eagle
    | Eagle3
    | MTP
    | Medusa
    | Merge
    | Drafter
)
_MODELS = (DraftModel, SelfDraft, Eagle, MTP, Medusa)
_KINDS = (NGram, Suffix, Synthetic, *_MODELS, Merge, Drafter)
_NAMED: dict[str, type[NGram | Suffix | SelfDraft | MTP]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "self": SelfDraft,
    "mtp": MTP,
}
_EXPECTED = (
    "None, 'ngram', 'suffix', 'self', 'mtp', a path or hub id of a smaller model or head, or an "
    "object of specrt.drafters"
)


def resolve(drafter: Any) -> AnyDrafter | None:
    """`Engine`'s `drafter` argument as one of the classes above.

    None, "ngram", "suffix", "self", "mtp", an object of these classes, or a smaller model given as
    `Engine`'s target would be; a folder or hub id may also hold a head, which its config and
    tensors tell. Raises InvalidArgumentError for anything else.
    """
    if drafter is None or isinstance(drafter, _KINDS):
        return drafter
    if isinstance(drafter, str) and drafter in _NAMED:
        return _NAMED[drafter]()
    if isinstance(drafter, type) and issubclass(drafter, _KINDS):
        raise InvalidArgumentError(
            f"[drafter] expected an object, got the class {drafter.__name__}: write "
            f"{drafter.__name__}(...)"
        )
    if isinstance(drafter, (str, os.PathLike)):
        text = os.fspath(drafter)
        # A word that is neither a hub id ("owner/name") nor a path is a misspelt kind.
        if "/" not in text and os.sep not in text and not os.path.exists(text):
            raise InvalidArgumentError(f"[drafter] expected {_EXPECTED}, got {text!r}")
        return _recognise(drafter)
    if hasattr(drafter, "state_dict") and hasattr(drafter, "config"):
        return DraftModel(model=drafter)
    raise InvalidArgumentError(f"[drafter] expected {_EXPECTED}, got {type(drafter).__name__}")


def _recognise(model: str | os.PathLike[str]) -> AnyDrafter:
    """What a folder or hub id holds: Medusa heads, an EAGLE head, or else a model."""
    from .loading.eagle import is_eagle, is_eagle3
    from .loading.medusa import is_medusa
    from .loading.open import find_folder

    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists() or os.fspath(model).endswith((".gguf", ".specrt")):
            return DraftModel(model=model)
        try:
            folder = find_folder(model, weights=False)
        except LoadError:  # whoever opens it says what is wrong
            return DraftModel(model=model)
    if is_medusa(folder):
        return Medusa(model=model)
    if not is_eagle(folder):
        return DraftModel(model=model)
    if is_eagle3(folder):
        return Eagle3(model)
    return Eagle(model)


def model_part_of(drafter: AnyDrafter | None) -> AnyDrafter | None:
    """The drafter, or of a `Merge` the part, that runs a model or head; None where none does."""
    parts = drafter.parts if isinstance(drafter, Merge) else [drafter]
    return next((part for part in parts if isinstance(part, _MODELS)), None)


def is_head(drafter: AnyDrafter | None) -> bool:
    """Whether it is a trained head over the target's hidden states, alone or merged."""
    return isinstance(model_part_of(drafter), (Eagle, MTP, Medusa))


def _check_integers(spec: Any, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise InvalidArgumentError(f"[{name}] expected an integer >= {least}, got {value!r}")


def _check_numbers(spec: Any, name: str, least: float = -math.inf, most: float = math.inf) -> None:
    value = getattr(spec, name)
    fine = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fine or not math.isfinite(value) or not least <= value <= most:
        raise InvalidArgumentError(
            f"[{name}] expected a finite number in [{least}, {most}], got {value!r}"
        )


def _check_flags(spec: Any, name: str) -> None:
    value = getattr(spec, name)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"[{name}] expected True or False, got {value!r}")
