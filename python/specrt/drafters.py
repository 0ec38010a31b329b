"""Drafters: what proposes tokens.

Any of them may cost time; with `coupled` verification none can change the output.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ._core import DraftTree
from .errors import InvalidArgumentError

__all__ = ["DraftModel", "Drafter", "NGram", "SelfDraft", "resolve"]


class Drafter(ABC):
    """Base of drafters written in Python: slower than the built-in ones, and as safe.

    class Repeat(specrt.Drafter):
        def propose(self, tokens, budget):
            return specrt.DraftTree.chain(tokens[-1:] * budget)
    """

    num_speculative_tokens: int = 4
    """The budget where the engine is given none."""

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
    occurrences the most recent one counts, or the first with `most_recent=False`.
    (Saxena, "Prompt lookup decoding", 2023.)
    """

    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    most_recent: bool = True
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max", "num_speculative_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got {value!r}")
        if not isinstance(self.most_recent, bool):
            raise InvalidArgumentError(
                f"[most_recent] expected True or False, got {self.most_recent!r}"
            )
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise InvalidArgumentError(
                f"[prompt_lookup_max] expected at least prompt_lookup_min = "
                f"{self.prompt_lookup_min}, got {self.prompt_lookup_max}"
            )


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


AnyDrafter = NGram | DraftModel | SelfDraft | Drafter


_KINDS: dict[str, type[NGram | SelfDraft]] = {"ngram": NGram, "self": SelfDraft}


def resolve(drafter: Any) -> AnyDrafter | None:
    """`Engine`'s `drafter` argument as one of the classes above.

    None, "ngram", "self", an object of these classes, or a smaller model given as `Engine`'s target
    would be. Raises InvalidArgumentError for anything else.
    """
    if drafter is None or isinstance(drafter, AnyDrafter):
        return drafter
    if isinstance(drafter, str) and drafter in _KINDS:
        return _KINDS[drafter]()
    if isinstance(drafter, type) and issubclass(drafter, AnyDrafter):
        raise InvalidArgumentError(
            f"[drafter] expected an object, got the class {drafter.__name__}: write "
            f"{drafter.__name__}(...)"
        )
    if isinstance(drafter, (str, os.PathLike)):
        text = os.fspath(drafter)
        # A word that is neither a hub id ("owner/name") nor a path is a misspelt kind.
        if "/" not in text and os.sep not in text and not os.path.exists(text):
            raise InvalidArgumentError(
                f"[drafter] expected None, 'ngram', 'self', a path or hub id of a smaller model, "
                f"or an object of specrt.drafters, got {text!r}"
            )
        return DraftModel(model=drafter)
    if hasattr(drafter, "state_dict") and hasattr(drafter, "config"):
        return DraftModel(model=drafter)
    raise InvalidArgumentError(
        f"[drafter] expected None, 'ngram', 'self', a path or hub id of a smaller model, or an "
        f"object of specrt.drafters, got {type(drafter).__name__}"
    )
