"""What a drafter's checkpoint may mean other than it seems to: readings for `doctor` to try.

All of these bite silently: shapes fit, nothing is refused, and next to nothing is accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .loading.source import Tensor

if TYPE_CHECKING:
    from .loading.head_fields import HeadCheckpoint

__all__ = ["Reading", "TargetFacts", "head_readings"]


@dataclass(frozen=True)
class TargetFacts:
    """What readings take from the target."""

    num_layers: int
    rope_inv_freq: tuple[float, ...]
    head_dim: int
    lm_head: Callable[[], Tensor]


@dataclass(frozen=True)
class Reading:
    """One way to understand a head."""

    name: str
    cure: str
    """What to change where this is the right one."""
    read: Callable[[HeadCheckpoint], HeadCheckpoint]


def head_readings(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Reading]:
    """All readings that differ from the head as it stands."""
    yield from _layers(head, target)
    yield from _norms(head, target)
    yield from _ropes(head, target)
    yield from _heads(head, target)


def _layers(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Reading]:
    layers = head.feature_layers
    if head.fields.head_kind == "fused":
        other = not head.fields.head_hidden_first
        order = "hidden state, then embedding" if other else "embedding, then hidden state"
        yield Reading(
            f"order: {order}",
            f"store fc's columns for {order}",
            lambda one: one.read_as(fields={"head_hidden_first": not one.fields.head_hidden_first}),
        )
        if not layers:
            return
    for step, word in ((1, "later"), (-1, "earlier")):
        moved = tuple(one + step for one in layers)
        if layers and all(0 <= one <= target.num_layers for one in moved):
            yield Reading(
                f"aux layers one {word}: {_list(moved)}",
                f"name the layers {_list(moved)} (by whose input they go)",
                lambda one, moved=moved: one.read_as(feature_layers=moved),  # type: ignore[misc]
            )
    if 1 < len(layers) <= 3:
        for order_of in itertools.permutations(layers):
            if order_of != layers:
                yield Reading(
                    f"aux order {_list(order_of)}",
                    f"name the layers in the order {_list(order_of)}",
                    lambda one, order_of=order_of: one.read_as(  # type: ignore[misc]
                        feature_layers=order_of
                    ),
                )


def _norms(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Reading]:
    fields = head.fields
    if fields.head_kind == "fused" and not head.feature_layers:
        count = (target.num_layers,)
        yield Reading(
            "target's state before its last norm",
            "train it on the state behind the norm, or feed it the one before",
            lambda one: one.read_as(feature_layers=count, feature_normed=False),
        )
    if fields.head_final_norm:
        fed = "before" if fields.head_norm_output else "after"
        yield Reading(
            f"own state fed back {fed} its last norm",
            f"norm_output: {str(not fields.head_norm_output).lower()}",
            lambda one: one.read_as(fields={"head_norm_output": not one.fields.head_norm_output}),
        )
    if fields.head_kind == "beside":
        value = not fields.head_norm_before_residual
        yield Reading(
            f"residual from the {'normed' if value else 'raw'} state",
            f"norm_before_residual: {str(value).lower()}",
            lambda one: one.read_as(
                fields={"head_norm_before_residual": not one.fields.head_norm_before_residual}
            ),
        )


def _ropes(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Reading]:
    fields = head.fields
    tried = [np.asarray(fields.rope_inv_freq)]
    choices = []
    if fields.head_dim == target.head_dim:
        choices.append(("the target's", target.rope_inv_freq))
    for theta in (10000.0, 500000.0, 1000000.0):
        plain = theta ** (-np.arange(0, fields.head_dim, 2) / fields.head_dim)
        choices.append((f"base {theta:g}, unscaled", tuple(float(one) for one in plain)))
    for name, factors in choices:
        values = np.asarray(factors)
        if any(len(one) == len(values) and np.allclose(one, values, rtol=1e-3) for one in tried):
            continue
        tried.append(values)
        yield Reading(
            f"rotary factors: {name}",
            f"rope_theta and rope_scaling: {name}",
            lambda one, factors=factors: one.read_as(  # type: ignore[misc]
                fields={"rope_inv_freq": factors, "rope_scale": 1.0}
            ),
        )


def _heads(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Reading]:
    if not head.fields.head_own_lm_head:
        return

    def shared(one: HeadCheckpoint) -> HeadCheckpoint:
        whole = target.lm_head()
        rows = list(one.target_of_draft) or slice(0, one.fields.vocab_size)
        kept = np.ascontiguousarray(whole.array[rows])
        return one.read_as(tensors={"lm_head": Tensor("lm_head", whole.dtype, kept)})

    if head.fields.hidden_size == target.lm_head().array.shape[1]:
        yield Reading(
            "target's output head in place of its own",
            "leave lm_head.weight out, or store the target's: the one there is not trained",
            shared,
        )


def _list(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def absolute(model: Any, **options: Any) -> HeadCheckpoint:
    """An EAGLE head whose d2t holds target ids. Raises LoadError where it cannot."""
    from .loading.eagle import open_eagle

    return open_eagle(model, absolute_ids=True, **options)
