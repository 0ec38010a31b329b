"""Drafters: what proposes tokens.

Any of them may cost time; with `coupled` verification none can change the output.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._core import DraftTree, StaticTree
from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from ._core import ModelConfig
    from .loading.medusa import MedusaCheckpoint

__all__ = [
    "DraftModel",
    "Drafter",
    "Medusa",
    "NGram",
    "SelfDraft",
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


@dataclass(frozen=True, kw_only=True)
class Medusa:
    """Medusa heads on the target's last hidden state (Cai et al., arXiv 2401.10774).

    Head i says what comes i + 1 tokens behind the target's own next one; the draft is a fixed tree
    of the heads' best alternatives. A folder that holds heads is recognised where `Engine` is
    given it as the drafter.
    """

    model: str | os.PathLike[str]
    """A folder or hub id with medusa_lm_head.safetensors or .pt, or vLLM's layout of it."""
    tree: str | Sequence[Sequence[int]] = "mc_sim_7b_63"
    """"mc_sim_7b_63", the reference's sparse tree, as deep as there are heads; "chain"; or a path
    of ranks for each node, the most worthwhile first: see `tree_from_accuracies`."""
    num_heads: int | None = None
    """The first so many heads; None takes all that the tree needs."""
    dtype: str = "auto"
    """Of the heads' weights, as `Engine`'s; "auto": float32 for a float32 target, else bfloat16."""
    num_speculative_tokens: int | None = None
    """Nodes a round, the first ones of the tree; None takes all of it."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)):
            raise InvalidArgumentError(f"[model] expected a path or hub id, got {self.model!r}")
        for name in ("num_heads", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got {value!r}")
        if isinstance(self.tree, str):
            if self.tree not in ("mc_sim_7b_63", "chain"):
                raise InvalidArgumentError(
                    f"[tree] expected 'mc_sim_7b_63', 'chain' or paths of ranks, got {self.tree!r}"
                )
        else:
            static_tree(self.tree)

    def tree_for(self, heads: int) -> StaticTree:
        """The tree that `heads` heads draft. Raises InvalidArgumentError where it is deeper."""
        if self.tree == "chain":
            return StaticTree.chain(heads)
        if isinstance(self.tree, str):
            return StaticTree.mc_sim_7b_63().cut(heads)
        tree = static_tree(self.tree)
        if tree.depth > heads:
            raise InvalidArgumentError(
                f"[tree] expected paths of at most {heads} ranks, one a head, got {tree.depth}"
            )
        return tree

    def open(self, target: ModelConfig, dtype: str) -> tuple[MedusaCheckpoint, StaticTree]:
        """The heads for a target of that config and dtype, and the tree that they draft.

        Heads deeper than the tree are left alone. Raises as `open_medusa` does.
        """
        from .loading.medusa import open_medusa

        options: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "target_dtype": dtype,
            "dtype": self.dtype,
        }
        checkpoint = open_medusa(self.model, num_heads=self.num_heads, **options)
        try:
            tree = self.tree_for(checkpoint.config.num_heads)
        except BaseException:
            checkpoint.close()
            raise
        if tree.depth < checkpoint.config.num_heads:
            checkpoint.close()
            checkpoint = open_medusa(self.model, num_heads=tree.depth, **options)
        return checkpoint, tree


def static_tree(paths: Any) -> StaticTree:
    """The core's tree of paths of ranks. Raises InvalidArgumentError."""

    def whole(one: Any) -> bool:
        return isinstance(one, int) and not isinstance(one, bool) and -(2**31) <= one < 2**31

    if (
        not isinstance(paths, Sequence)
        or isinstance(paths, (str, bytes))
        or not all(
            isinstance(path, Sequence)
            and not isinstance(path, (str, bytes))
            and all(map(whole, path))
            for path in paths
        )
    ):
        raise InvalidArgumentError(f"[tree] expected a list of lists of ranks, got {paths!r}")
    return StaticTree([list(path) for path in paths])


def tree_from_accuracies(accuracies: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The tree of that many nodes that is accepted furthest on average, as `Medusa.tree` has it.

    accuracies[d][r], in [0, 1], is how often the alternative of rank r at depth d + 1 is right
    where the path to it was: measured on texts like those to come, or assumed. The tree grows
    greedily by the product along a path, which is optimal since a product only falls (arXiv
    2401.10774, section 2.3.3). Raises InvalidArgumentError.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes < 2**31:
        raise InvalidArgumentError(f"[nodes] expected an integer >= 1, got {nodes!r}")
    return StaticTree.from_accuracies([list(one) for one in accuracies], nodes).paths


AnyDrafter = NGram | DraftModel | SelfDraft | Medusa | Drafter


_KINDS: dict[str, type[NGram | SelfDraft]] = {"ngram": NGram, "self": SelfDraft}


def resolve(drafter: Any) -> AnyDrafter | None:
    """`Engine`'s `drafter` argument as one of the classes above.

    None, "ngram", "self", an object of these classes, a folder of Medusa heads, or a smaller model
    given as `Engine`'s target would be. Raises InvalidArgumentError for anything else.
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
        from .loading.medusa import is_medusa

        folder = Path(text).expanduser()
        if folder.is_dir() and is_medusa(folder):
            return Medusa(model=drafter)
        return DraftModel(model=drafter)
    if hasattr(drafter, "state_dict") and hasattr(drafter, "config"):
        return DraftModel(model=drafter)
    raise InvalidArgumentError(
        f"[drafter] expected None, 'ngram', 'self', a path or hub id of a smaller model, or an "
        f"object of specrt.drafters, got {type(drafter).__name__}"
    )
