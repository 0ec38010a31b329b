"""Every drafter that needs no training against plain decoding, by kind of prompt.

python bench/drafters/compare.py [--drafters NAME ...] [--kinds KIND ...] [--per-kind N]
    [--num-speculative-tokens N] [--max-tokens N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import specrt
from specrt import _core
from specrt.benchmark import Totals, builtin_prompts
from specrt.demo import demo_model_path
from specrt.drafters import Merge, NGram, SelfDraft, Suffix
from specrt.outputs import Metrics

# By name: given the number of the target's layers.
DRAFTERS: dict[str, Callable[[int], Any]] = {
    "ngram": lambda layers: NGram(),
    "suffix": lambda layers: Suffix(),
    "merge": lambda layers: Merge([NGram(), Suffix()]),
    "self-int4": lambda layers: SelfDraft(precision="int4"),
    "self-w8a8": lambda layers: SelfDraft(precision="w8a8"),
    "self-layers": lambda layers: SelfDraft(layers=max(1, layers * 2 // 3)),
}
ALL = "all"


@dataclass(frozen=True)
class Pair:
    """One prompt with a drafter and, just before or after it, without."""

    kind: str
    own: Metrics
    plain: Metrics


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs all, by turns. Raises SystemExit where a text differs from the plain one."""
    prompts = []
    for kind in options.kinds:
        prompts += [one for one in builtin_prompts() if one.kind == kind][: options.per_kind]
    common = {
        "threads": options.threads,
        "max_batch_size": 1,
        "max_model_len": options.max_model_len,
    }
    pairs: dict[str, list[list[Pair]]] = {name: [] for name in options.drafters}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # One packed file that all engines map: the weights are in memory once.
        packed = folder / "target.specrt"
        with specrt.Engine(options.model, dtype=options.dtype, **common) as engine:
            engine.save(packed)
            assert engine.tokenizer is not None
            encode = engine.tokenizer.apply_chat_template
            ids = {one.id: encode([{"role": "user", "content": one.text}]) for one in prompts}
        layers = _core.Model.map(str(packed)).config.num_layers
        plain = stack.enter_context(specrt.Engine(packed, **common))
        progress = stack.enter_context(
            Progress(console=console, transient=True, disable=not console.is_terminal)
        )
        steps = len(prompts) * options.repeats * len(options.drafters)
        task = progress.add_task("running", total=steps)
        for turn in range(options.repeats):
            with ExitStack() as opened:
                # New each time: what suffix decoding keeps of an earlier turn would be the answer.
                engines = {
                    name: opened.enter_context(
                        specrt.Engine(
                            packed,
                            DRAFTERS[name](layers),
                            num_speculative_tokens=options.num_speculative_tokens,
                            policy=options.policy,
                            **common,
                        )
                    )
                    for name in options.drafters
                }
                for name in options.drafters:
                    pairs[name].append([])
                for i, prompt in enumerate(prompts):
                    for j, name in enumerate(options.drafters):
                        # Neighbours in time, each first as often as the other.
                        order = [plain, engines[name]]
                        if (turn + i + j) % 2:
                            order.reverse()
                        params = specrt.SamplingParams(max_tokens=options.max_tokens)
                        given = {one: one.generate(ids[prompt.id], params) for one in order}
                        own, other = given[engines[name]], given[plain]
                        if own.token_ids != other.token_ids:
                            sys.exit(f"{prompt.id}: {name} says something else than plain decoding")
                        pairs[name][-1].append(Pair(prompt.kind, own.metrics, other.metrics))
                        progress.advance(task)
    return {
        "model": Path(str(options.model)).name,
        "dtype": options.dtype,
        "num_speculative_tokens": options.num_speculative_tokens,
        "policy": options.policy,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "prompts": [one.id for one in prompts],
        "kinds": {
            kind: {name: _row(turns, kind) for name, turns in pairs.items()}
            for kind in [*options.kinds, ALL]
        },
    }


def _row(turns: list[list[Pair]], kind: str) -> dict[str, Any]:
    chosen = [[one for one in turn if kind in (ALL, one.kind)] for turn in turns]
    own = [Totals.of(one.own for one in turn) for turn in chosen]
    plain = [Totals.of(one.plain for one in turn) for turn in chosen]
    first = own[0]
    return {
        "tokens": first.tokens,
        "rounds": first.rounds,
        "drafted": first.drafted,
        "accepted": first.accepted,
        "acceptance_rate": first.acceptance_rate,
        "acceptance_length": first.acceptance_length,
        "alpha": first.alpha,
        "alpha_per_position": first.alpha_per_position,
        "tokens_per_second": statistics.median(one.tokens_per_second for one in own),
        "plain_tokens_per_second": statistics.median(one.tokens_per_second for one in plain),
        "vs_plain": statistics.median(
            _speed_up(one.decode_seconds, other.decode_seconds)
            for one, other in zip(own, plain, strict=True)
        ),
        "vs_plain_by_prompt": [
            statistics.median(_speed_up(one.own.tpot_seconds, one.plain.tpot_seconds) for one in at)
            for at in zip(*chosen, strict=True)
        ],
    }


def _speed_up(seconds: float, plain: float) -> float:
    """1.0 where there was nothing to time: a text of one token."""
    return plain / seconds if seconds > 0 and plain > 0 else 1.0


def show(result: dict[str, Any], console: Console) -> None:
    """A table a kind, and one of all kinds side by side."""
    kinds = result["kinds"]
    for kind, rows in kinds.items():
        table = Table(title=kind, title_justify="left")
        table.add_column("drafter")
        columns = ("τ", "α", "α by position", "accepted/drafted", "tokens/s", "plain", "vs plain")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in rows.items():
            drafted = row["drafted"] > 0
            table.add_row(
                name,
                f"{row['acceptance_length']:.2f}",
                f"{row['alpha']:.2f}" if drafted else "–",
                " ".join(f"{one:.2f}" for one in row["alpha_per_position"][:8]),
                f"{row['accepted']}/{row['drafted']}" if drafted else "–",
                f"{row['tokens_per_second']:.1f}",
                f"{row['plain_tokens_per_second']:.1f}",
                f"{row['vs_plain']:.2f}",
            )
        console.print(table)
    table = Table(title="τ (tokens/s as a multiple of plain)", title_justify="left")
    table.add_column("drafter")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name in kinds[ALL]:
        cells = (rows[name] for rows in kinds.values())
        table.add_row(
            name, *(f"{one['acceptance_length']:.2f} ({one['vs_plain']:.2f})" for one in cells)
        )
    console.print(table)


def main() -> None:
    kinds = list(dict.fromkeys(one.kind for one in builtin_prompts()))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="as Engine's target; the demo model unless given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--per-kind", type=int, default=8, help="prompts of each kind")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        help="draft tokens a round; each one's default",
    )
    parser.add_argument("--policy", choices=("brake", "fixed"), default="brake")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    options = parser.parse_args()
    for name in ("per_kind", "num_speculative_tokens", "repeats", "max_tokens", "max_model_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"[{name}] expected at least 1, got {value}")
    for name in ("drafters", "kinds"):
        setattr(options, name, list(dict.fromkeys(getattr(options, name))))
    options.model = options.model or str(demo_model_path())
    console = Console(width=None if sys.stdout.isatty() else 120)
    result = run(options, console)
    show(result, console)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
