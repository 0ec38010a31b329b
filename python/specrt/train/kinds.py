"""What differs between the kinds of drafters that are trained: states, modules, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..errors import InvalidArgumentError
from ..planning import Features
from .eagle3 import Eagle3Sizes, Eagle3Trainer
from .export import write_checkpoint
from .parts import product_dtype, stored
from .vocabulary import choose_vocabulary, coverage

if TYPE_CHECKING:
    from .loop import Trainer
    from .shards import Example
    from .target import TargetTables

__all__ = ["Eagle3Kind", "Kind"]

SCALED_FROM = 500
"""Texts that the sizes of channels are taken from."""


class Kind(Protocol):
    """One kind of drafter, with its options."""

    @property
    def name(self) -> str: ...

    def features(self, tables: TargetTables) -> Features:
        """The target's states that it is trained from, the final norm's output last."""

    def sizes(self, examples: Sequence[Example]) -> list[int]:
        """Rows to learn from, by text."""

    def make(
        self, tables: TargetTables, examples: Sequence[Example], seed: int, say: Any
    ) -> Trainer:
        """A fresh drafter."""

    def identity(self) -> dict[str, Any]:
        """What of its options a checkpoint depends on."""

    def write(self, trainer: Any, out: Path) -> None:
        """The drafter in its public format."""

    def drafters(self, out: Path) -> dict[str, Any]:
        """Ways to draft with it, for `Engine`."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Kind:
    """An EAGLE-3 head."""

    draft_vocab_size: int = 8192
    """Tokens that it can say, at most as many as the target has."""
    aux_layers: tuple[int, ...] | None = None
    """Layers of the target whose input it reads; None: 2, n // 2, n - 3 of n."""
    intermediate_size: int | None = None
    """None: the target's."""
    rope_theta: float | None = None
    """None: the target's."""
    test_steps: int = 3
    """Of training-time test."""
    precision: str = "auto"
    """Of products: "float32", "bfloat16"; "auto": bfloat16 where the processor has it."""
    name: str = "eagle3"

    def __post_init__(self) -> None:
        for name in ("draft_vocab_size", "intermediate_size", "test_steps"):
            value = getattr(self, name)
            if value is None and name == "intermediate_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got {value!r}")
        check_precision(self.precision)

    def layers(self, tables: TargetTables) -> tuple[int, ...]:
        """The layers that it reads. Raises InvalidArgumentError."""
        count = tables.fields.num_layers
        layers = self.aux_layers
        if layers is None:
            layers = (2, count // 2, count - 3)
        if len(layers) < 1 or not all(0 <= one <= count for one in layers):
            raise InvalidArgumentError(
                f"[aux_layers] expected layers of the target, 0 to {count}, got {list(layers)}"
            )
        return tuple(layers)

    def features(self, tables: TargetTables) -> Features:
        return Features(layers=self.layers(tables), normed=True)

    def sizes(self, examples: Sequence[Example]) -> list[int]:
        from .batches import rows_of

        return [len(rows_of(one).rows) for one in examples]

    def make(
        self, tables: TargetTables, examples: Sequence[Example], seed: int, say: Any
    ) -> Eagle3Trainer:
        fields = tables.fields
        size = min(self.draft_vocab_size, fields.vocab_size)
        said = [np.asarray(one.tokens)[np.asarray(one.learnt) > 0] for one in examples]
        vocabulary = choose_vocabulary(said, fields.vocab_size, size)
        share = coverage(said, vocabulary, fields.vocab_size)
        say(f"draft vocabulary: {size} of {fields.vocab_size} tokens, {share:.1%} of the texts")
        layers = self.layers(tables)
        sizes = Eagle3Sizes(
            aux_layers=layers,
            intermediate_size=self.intermediate_size or fields.intermediate_size,
            rope_theta=self.rope_theta or theta_of(fields.rope_inv_freq, fields.head_dim),
            max_positions=max(len(one.tokens) for one in examples),
        )
        trainer = Eagle3Trainer(
            fields,
            sizes,
            vocabulary,
            stored(tables.tensor("embedding")),
            stored(tables.lm_head()),
            stored(tables.tensor("norm")),
            channel_scales(examples, len(layers) * fields.hidden_size),
            test_steps=self.test_steps,
            seed=seed,
            dtype=product_dtype(self.precision),
        )
        count = sum(one.numel() for one in trainer.parameters.values())
        say(f"head: {count / 1e6:.2f} M parameters, {2 * count / 1e6:.1f} MB in bfloat16")
        return trainer

    def identity(self) -> dict[str, Any]:
        return {**vars(self), "aux_layers": None if self.aux_layers is None else [*self.aux_layers]}

    def write(self, trainer: Eagle3Trainer, out: Path) -> None:
        write_checkpoint(out, trainer.config(), trainer.exported())

    def drafters(self, out: Path) -> dict[str, Any]:
        from ..drafters import Eagle3

        def tree(nodes: int) -> Eagle3:
            return Eagle3(out, top_k=8, depth=4, num_speculative_tokens=nodes)

        chain = Eagle3(out, num_speculative_tokens=4)
        return {"chain of 4": chain, "tree of 16": tree(16), "tree of 32": tree(32)}


def check_precision(precision: str) -> None:
    """Raises InvalidArgumentError."""
    if precision not in ("auto", "float32", "bfloat16"):
        raise InvalidArgumentError(
            f"[precision] expected 'auto', 'float32' or 'bfloat16', got {precision!r}"
        )


def channel_scales(examples: Sequence[Example], width: int) -> torch.Tensor:
    """Root mean square of each of the first `width` channels, 1 where it is always 0.

    Of learnt positions alone: a text's first token is often a thousand times larger than the rest.
    """
    squares = torch.zeros(width, dtype=torch.float64)
    count = 0
    spread = max(1, len(examples) // SCALED_FROM)
    for one in examples[::spread]:
        rows = np.flatnonzero(np.asarray(one.learnt[: len(one.features)]))
        values = torch.from_numpy(np.asarray(one.features[rows, :width])).view(torch.bfloat16)
        squares += values.double().square().sum(0)
        count += len(rows)
    scales = (squares / max(1, count)).sqrt().float()
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def theta_of(inv_freq: tuple[float, ...], head_dim: int) -> float:
    """The base of plain rotary factors; 10000 where they are scaled."""
    if len(inv_freq) < 2:
        return 10000.0
    theta = float(inv_freq[1]) ** (-head_dim / 2.0)
    plain = [theta ** (-2.0 * i / head_dim) for i in range(len(inv_freq))]
    if len(inv_freq) != head_dim // 2 or not np.allclose(inv_freq, plain, rtol=1e-4, atol=0.0):
        return 10000.0
    return float(f"{theta:.4g}")
