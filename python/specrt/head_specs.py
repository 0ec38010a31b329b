"""Draft heads as users describe them: EAGLE's, multi-token prediction modules, Medusa's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ._core import StaticTree
from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from ._core import ModelConfig
    from .loading.medusa import MedusaCheckpoint

__all__ = ["MTP", "Eagle", "Eagle3", "Medusa", "static_tree", "tree_from_accuracies"]


def _tree_sizes(spec: _HeadSpec, tokens: int | None) -> tuple[int, int | None]:
    """Nodes a round and levels (None: as many as nodes) of a head's chain or tree."""
    for name, value in (
        ("num_speculative_tokens", spec.num_speculative_tokens),
        ("total_token", spec.total_token),
        ("depth", spec.depth),
        ("top_k", spec.top_k),
    ):
        if value is None and name != "top_k":
            continue
        least = 2 if name == "total_token" else 1 if name != "depth" else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise InvalidArgumentError(f"[{name}] expected an integer >= {least}, got {value!r}")
    if spec.top_k > 64:
        raise InvalidArgumentError(f"[top_k] expected at most 64, got {spec.top_k}")
    if spec.depth is not None and spec.depth >= 1024:
        raise InvalidArgumentError(f"[depth] expected at most 1023, got {spec.depth}")
    nodes = spec.num_speculative_tokens
    if spec.total_token is not None:
        if nodes is not None and nodes != spec.total_token - 1:
            raise InvalidArgumentError(
                f"[total_token] expected num_speculative_tokens + 1 = {nodes + 1} (it counts the "
                f"token before the draft), got {spec.total_token}"
            )
        nodes = spec.total_token - 1
    if nodes is None:
        nodes = spec.default_tokens if spec.top_k == 1 else 59
        if spec.top_k == 1 and spec.depth is not None:
            nodes = spec.depth + 1
    if tokens is not None:
        nodes = tokens
    if spec.depth is not None:
        return nodes, spec.depth + 1
    return nodes, None if spec.top_k == 1 else 8


@dataclass(frozen=True)
class _HeadSpec:
    """What heads over the target's hidden states have in common.

    With `top_k` 1 the draft is a chain of `num_speculative_tokens`. With more it is a tree as
    EAGLE-2 grows it, with EAGLE's own names and defaults: on each of 1 + `depth` (7) levels the
    `top_k` best nodes get `top_k` children, and the best `total_token` - 1 (59) of all are the
    draft; `num_speculative_tokens` is that number of nodes.
    """

    default_tokens: ClassVar[int] = 4
    """Of a chain."""
    _: KW_ONLY
    dtype: str = "auto"
    """As `Engine`'s, of the head's own weights."""
    num_speculative_tokens: int | None = None
    total_token: int | None = None
    depth: int | None = None
    top_k: int = 1

    def __post_init__(self) -> None:
        nodes, _ = _tree_sizes(self, None)
        object.__setattr__(self, "num_speculative_tokens", nodes)

    def sizes(self, tokens: int | None, modules: int, merged: bool) -> tuple[int, int]:
        """Nodes a round, and tokens along a path at most.

        `tokens`: the nodes that were asked for; None leaves it to the head. `modules`: how many
        draft one behind the other. `merged`: `tokens` are those of a `Merge`.
        """
        nodes = self.num_speculative_tokens if tokens is None else tokens
        assert nodes is not None
        _, levels = _tree_sizes(self, None)
        return nodes, max(1, min(nodes, 1024) if levels is None else levels)


@dataclass(frozen=True)
class Eagle(_HeadSpec):
    """An EAGLE-1 or EAGLE-2 head (Li et al., arXiv 2401.15077 and 2406.16858).

    `model` is a folder or hub id with config.json and pytorch_model.bin (which needs torch) or
    model.safetensors. Chains and trees are described at their options.
    """

    model: Any = None
    """The head's folder or hub id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, (str, os.PathLike)):
            raise InvalidArgumentError(
                f"[model] expected the folder or hub id of a head, got {self.model!r}"
            )


@dataclass(frozen=True)
class Eagle3(Eagle):
    """An EAGLE-3 head (Li et al., arXiv 2503.01840), in EAGLE's, vLLM's or speculators' layout.

    The head reads hidden states of several layers of the target: those that its config names, or
    `aux_layer_ids`, or, with a warning, 2, n // 2 and n - 3 of n layers. An id is the layer whose
    *input* is read; with `aux_convention="output"`, the layer whose output is (one more).
    """

    _: KW_ONLY
    aux_layer_ids: tuple[int, ...] | None = None
    aux_convention: Literal["input", "output"] = "input"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aux_convention not in ("input", "output"):
            raise InvalidArgumentError(
                f"[aux_convention] expected 'input' or 'output', got {self.aux_convention!r}"
            )
        if self.aux_layer_ids is not None:
            ids = self.aux_layer_ids
            if not isinstance(ids, (list, tuple)) or not all(
                isinstance(one, int) and not isinstance(one, bool) for one in ids
            ):
                raise InvalidArgumentError(f"[aux_layer_ids] expected layer ids, got {ids!r}")
            object.__setattr__(self, "aux_layer_ids", tuple(ids))


@dataclass(frozen=True)
class MTP(_HeadSpec):
    """The multi-token prediction modules inside the target's own checkpoint.

    MiMo's, Qwen3-Next's and DeepSeek-V3's names are known (Gloeckle et al., arXiv 2404.19737;
    DeepSeek-V3, 2412.19437). Module k drafts the k-th token, over the states of the module before
    it. By default a draft is as long as there are modules, and a tree (`top_k` > 1) as deep. Only
    where more is asked for, by `num_speculative_tokens` of a chain or by `depth`, the last module
    runs again for what lies beyond; it was not trained for that, so fewer of those are accepted. A
    `Merge`'s own number of tokens does not ask for it. Modules that a draft never comes to are not
    loaded.
    """

    def __post_init__(self) -> None:
        _tree_sizes(self, None)
        if self.num_speculative_tokens is None and (self.total_token, self.depth) != (None, None):
            super().__post_init__()  # else the checkpoint decides

    def sizes(self, tokens: int | None, modules: int, merged: bool) -> tuple[int, int]:
        if self.depth is not None:
            return super().sizes(tokens, modules, merged)
        own = self.num_speculative_tokens
        if self.top_k == 1:
            own = own or modules
            nodes = own if tokens is None else tokens
            return nodes, max(1, min(nodes, own if merged else nodes, 1024))
        most = self.top_k + (modules - 1) * self.top_k**2
        own = own or min(59, most)
        return own if tokens is None else tokens, modules


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
