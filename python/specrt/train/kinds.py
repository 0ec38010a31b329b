"""What differs between the kinds of drafters that are trained: states, modules, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..errors import InvalidArgumentError, UnsupportedError
from ..planning import Features
from .batches import rows_of
from .draft import DraftTrainer, check_family, spread_layers
from .eagle3 import Eagle3Sizes, Eagle3Trainer
from .export import write_checkpoint
from .medusa import MedusaTrainer
from .parts import product_dtype, stored
from .vocabulary import choose_vocabulary, coverage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .loop import Trainer
    from .shards import Example
    from .target import TargetTables

__all__ = ["DraftKind", "Eagle3Kind", "Kind", "MedusaKind"]

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

    def write(self, trainer: Any, tables: TargetTables, out: Path) -> None:
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
        check_counts(self, "draft_vocab_size", "test_steps")
        if self.intermediate_size is not None:
            check_counts(self, "intermediate_size")
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
        return [len(rows_of(one).rows) for one in examples]

    def make(
        self, tables: TargetTables, examples: Sequence[Example], seed: int, say: Any
    ) -> Eagle3Trainer:
        fields = tables.fields
        vocabulary = vocabulary_of(examples, self.draft_vocab_size, fields.vocab_size, say)
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
        say_size(trainer, say)
        return trainer

    def identity(self) -> dict[str, Any]:
        return {**vars(self), "aux_layers": None if self.aux_layers is None else [*self.aux_layers]}

    def write(self, trainer: Eagle3Trainer, tables: TargetTables, out: Path) -> None:
        write_checkpoint(out, trainer.config(), trainer.exported())

    def drafters(self, out: Path) -> dict[str, Any]:
        from ..drafters import Eagle3

        def tree(nodes: int) -> Eagle3:
            return Eagle3(out, top_k=8, depth=4, num_speculative_tokens=nodes)

        chain = Eagle3(out, num_speculative_tokens=4)
        return {"chain of 4": chain, "tree of 16": tree(16), "tree of 32": tree(32)}


@dataclass(frozen=True, kw_only=True)
class MedusaKind:
    """Medusa-1 heads."""

    num_heads: int = 4
    num_layers: int = 1
    """Residual blocks of each head."""
    draft_vocab_size: int | None = 8192
    """Tokens that they can say, in vLLM's layout; None: all, in the reference's."""
    precision: str = "auto"
    """As `Eagle3Kind`'s."""
    name: str = "medusa"

    def __post_init__(self) -> None:
        check_counts(self, "num_heads", "num_layers")
        if self.draft_vocab_size is not None:
            check_counts(self, "draft_vocab_size")
        check_precision(self.precision)

    def features(self, tables: TargetTables) -> Features:
        return Features(normed=True)

    def sizes(self, examples: Sequence[Example]) -> list[int]:
        return [len(rows_of(one).rows) for one in examples]

    def make(
        self, tables: TargetTables, examples: Sequence[Example], seed: int, say: Any
    ) -> MedusaTrainer:
        size = self.draft_vocab_size or tables.fields.vocab_size
        trainer = MedusaTrainer(
            tables.fields,
            vocabulary_of(examples, size, tables.fields.vocab_size, say),
            stored(tables.lm_head()),
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            dtype=product_dtype(self.precision),
        )
        say_size(trainer, say)
        return trainer

    def identity(self) -> dict[str, Any]:
        return dict(vars(self))

    def write(self, trainer: MedusaTrainer, tables: TargetTables, out: Path) -> None:
        config = trainer.config(Path(tables.name).name)
        write_checkpoint(out, config, trainer.exported(), trainer.file)

    def drafters(self, out: Path) -> dict[str, Any]:
        from ..drafters import Medusa

        found = {f"chain of {self.num_heads}": Medusa(model=out, tree="chain")}
        if self.num_heads <= 4:
            found["mc_sim_7b_63"] = Medusa(model=out)
        return found


@dataclass(frozen=True, kw_only=True)
class DraftKind:
    """A smaller Llama made of some of the target's layers."""

    layers: int = 4
    precision: str = "auto"
    """As `Eagle3Kind`'s."""
    name: str = "draft"

    def __post_init__(self) -> None:
        check_counts(self, "layers")
        check_precision(self.precision)

    def features(self, tables: TargetTables) -> Features:
        count = tables.fields.num_layers
        if self.layers >= count:
            raise InvalidArgumentError(
                f"[layers] expected fewer than the target's {count}, got {self.layers}"
            )
        check_family(tables.fields)
        return Features(normed=True)

    def sizes(self, examples: Sequence[Example]) -> list[int]:
        return [len(DraftTrainer.rows_of(one).rows) for one in examples]

    def make(
        self, tables: TargetTables, examples: Sequence[Example], seed: int, say: Any
    ) -> DraftTrainer:
        fields = tables.fields
        kept = spread_layers(fields.num_layers, self.layers)
        say(f"layers {kept} of the target's {fields.num_layers}")
        theta = plain_theta(fields.rope_inv_freq, fields.head_dim)
        if theta is None:
            raise UnsupportedError("[target] expected rotary factors without scaling, got others")
        trainer = DraftTrainer(
            tables,
            kept,
            theta,
            max_positions=max(len(one.tokens) for one in examples),
            dtype=product_dtype(self.precision),
        )
        say_size(trainer, say)
        return trainer

    def identity(self) -> dict[str, Any]:
        return dict(vars(self))

    def write(self, trainer: DraftTrainer, tables: TargetTables, out: Path) -> None:
        config = trainer.config(tables.eos_token_ids, tables.bos_token_id)
        write_checkpoint(out, config, trainer.exported())
        tokenizer = tables.tokenizer()
        if tokenizer is not None:
            tokenizer.hf.save_pretrained(out)

    def drafters(self, out: Path) -> dict[str, Any]:
        from ..drafters import DraftModel

        return {"chain of 4": DraftModel(model=out, num_speculative_tokens=4)}


def vocabulary_of(
    examples: Sequence[Example], size: int, vocab_size: int, say: Any
) -> NDArray[np.int64]:
    """The draft vocabulary, of at most all tokens; told with its share of what is learnt."""
    size = min(size, vocab_size)
    said = [np.asarray(one.tokens)[np.asarray(one.learnt) > 0] for one in examples]
    vocabulary = choose_vocabulary(said, vocab_size, size)
    share = coverage(said, vocabulary, vocab_size)
    say(f"draft vocabulary: {size} of {vocab_size} tokens, {share:.1%} of the texts")
    return vocabulary


def say_size(trainer: Trainer, say: Any) -> None:
    """Tell how large it is."""
    count = sum(one.numel() for one in trainer.parameters.values())
    say(f"{count / 1e6:.2f} M parameters in training, {2 * count / 1e6:.1f} MB in bfloat16")


def check_counts(kind: Any, *names: str) -> None:
    """Raises InvalidArgumentError."""
    for name in names:
        value = getattr(kind, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise InvalidArgumentError(f"[{name}] expected an integer >= 1, got {value!r}")


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
    return plain_theta(inv_freq, head_dim) or 10000.0


def plain_theta(inv_freq: tuple[float, ...], head_dim: int) -> float | None:
    """The base of rotary factors, None where they are scaled."""
    if len(inv_freq) < 2 or len(inv_freq) != head_dim // 2:
        return None
    theta = float(f"{float(inv_freq[1]) ** (-head_dim / 2.0):.4g}")
    plain = [theta ** (-2.0 * i / head_dim) for i in range(len(inv_freq))]
    return theta if np.allclose(inv_freq, plain, rtol=1e-3, atol=0.0) else None
