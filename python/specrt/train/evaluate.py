"""What a drafter comes to on held-out prompts, measured through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..bench.prompts import BenchPrompt, Totals
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Measured", "as_table", "evaluate"]


@dataclass(frozen=True)
class Measured:
    """One way to draft, on the prompts of one kind."""

    drafter: str
    kind: str
    temperature: float
    prompts: int
    tokens: int
    acceptance_length: float
    """τ: tokens a round."""
    alpha_per_position: list[float]


def evaluate(
    target: Any,
    drafters: dict[str, Any],
    prompts: Sequence[BenchPrompt],
    *,
    dtype: str = "auto",
    tokenizer: Any = None,
    threads: int | None = None,
    max_tokens: int = 128,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
) -> list[Measured]:
    """Answer every prompt with each drafter (name -> what `Engine` takes), all drafts at full size.

    What is drafted and accepted does not depend on the batch, so prompts run together.
    """
    from .. import Engine

    found = []
    for name, drafter in drafters.items():
        with Engine(
            target,
            drafter=drafter,
            dtype=dtype,
            tokenizer=tokenizer,
            threads=threads,
            policy="fixed",
            self_test=False,
            max_batch_size=16,
            max_num_batched_tokens=2048,
        ) as engine:
            for temperature in temperatures:
                params = [
                    SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i)
                    for i in range(len(prompts))
                ]
                outputs = engine.chat(
                    [[{"role": "user", "content": one.text}] for one in prompts], params
                )
                for kind in dict.fromkeys(one.kind for one in prompts):
                    of_kind = [
                        output.metrics
                        for one, output in zip(prompts, outputs, strict=True)
                        if one.kind == kind
                    ]
                    totals = Totals.of(of_kind)
                    found.append(
                        Measured(
                            name,
                            kind,
                            temperature,
                            len(of_kind),
                            totals.tokens,
                            totals.acceptance_length,
                            totals.alpha_per_position,
                        )
                    )
    return found


def as_table(measured: Sequence[Measured]) -> Table:
    """One row a drafter and kind."""
    from rich.table import Table

    table = Table()
    for column in ("kind", "drafter"):
        table.add_column(column)
    for column in ("T", "prompts", "tokens", "τ", "α at 1, 2, ..."):
        table.add_column(column, justify="right")
    for one in measured:
        table.add_row(
            one.kind,
            one.drafter,
            f"{one.temperature:g}",
            str(one.prompts),
            str(one.tokens),
            f"{one.acceptance_length:.2f}",
            " ".join(f"{alpha:.2f}" for alpha in one.alpha_per_position),
        )
    return table


def as_json(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The same, for a file."""
    return [asdict(one) for one in measured]
