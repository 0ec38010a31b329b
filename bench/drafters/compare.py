"""Every drafter that needs no training against plain decoding, by kind of prompt.

python bench/drafters/compare.py [--model MODEL] [--per-kind N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import specrt
from specrt import _core
from specrt.benchmark import Totals, builtin_prompts
from specrt.demo import demo_model_path
from specrt.drafters import NGram, SelfDraft

# By name: given the number of the target's layers.
DRAFTERS: dict[str, Callable[[int], Any]] = {
    "ngram": lambda layers: NGram(),
    "self-int4": lambda layers: SelfDraft(precision="int4"),
    "self-w8a8": lambda layers: SelfDraft(precision="w8a8"),
    "self-layers": lambda layers: SelfDraft(layers=max(1, layers * 2 // 3)),
}
PLAIN = "none"


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs all, by turns. Raises SystemExit where a text differs from the plain one."""
    prompts = []
    for kind in options.kinds:
        prompts += [one for one in builtin_prompts() if one.kind == kind][: options.per_kind]
    names = [PLAIN, *options.drafters]
    common = {
        "threads": options.threads,
        "max_batch_size": 1,
        "max_model_len": options.max_model_len,
    }
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
        engines = {
            name: stack.enter_context(
                specrt.Engine(packed, DRAFTERS[name](layers) if name != PLAIN else None, **common)
            )
            for name in names
        }
        params = specrt.SamplingParams(max_tokens=options.max_tokens)
        outputs: dict[tuple[str, int], list[specrt.RequestOutput]] = {
            (name, turn): [] for name in names for turn in range(options.repeats)
        }
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("running", total=len(prompts) * options.repeats)
            for turn in range(options.repeats):
                for prompt in prompts:
                    # One after the other on the same prompt, another one first each time.
                    shift = (turn + len(outputs[PLAIN, turn])) % len(names)
                    for name in names[shift:] + names[:shift]:
                        output = engines[name].generate(ids[prompt.id], params)
                        outputs[name, turn].append(output)
                    progress.advance(task)
        for (name, turn), given in outputs.items():
            for prompt, one, plain in zip(prompts, given, outputs[PLAIN, turn], strict=True):
                if one.token_ids != plain.token_ids:
                    sys.exit(f"{prompt.id}: {name} says something else than plain decoding")
    kinds = [one.kind for one in prompts]
    return {
        "model": Path(str(options.model)).name,
        "dtype": options.dtype,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "kinds": {
            kind: {name: _row(outputs, kinds, kind, name, options.repeats) for name in names}
            for kind in options.kinds
        },
    }


def _row(
    outputs: dict[tuple[str, int], list[specrt.RequestOutput]],
    kinds: list[str],
    kind: str,
    name: str,
    repeats: int,
) -> dict[str, Any]:
    def totals(who: str, turn: int) -> Totals:
        return Totals.of(
            one.metrics for one, of in zip(outputs[who, turn], kinds, strict=True) if of == kind
        )

    turns = [totals(name, turn) for turn in range(repeats)]
    plain = [totals(PLAIN, turn) for turn in range(repeats)]
    first = turns[0]
    return {
        "tokens": first.tokens,
        "rounds": first.rounds,
        "drafted": first.drafted,
        "accepted": first.accepted,
        "acceptance_length": first.acceptance_length,
        "alpha": first.alpha,
        "alpha_per_position": first.alpha_per_position,
        "tokens_per_second": statistics.median(one.tokens_per_second for one in turns),
        "vs_plain": statistics.median(
            one.tokens_per_second / other.tokens_per_second if other.tokens_per_second else 0.0
            for one, other in zip(turns, plain, strict=True)
        ),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """A table a kind."""
    for kind, rows in result["kinds"].items():
        table = Table(title=kind, title_justify="left")
        table.add_column("drafter")
        for column in ("τ", "α", "α by position", "accepted/drafted", "tokens/s", "vs plain"):
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
                f"{row['vs_plain']:.2f}",
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    options = parser.parse_args()
    for name in ("per_kind", "repeats", "max_tokens", "max_model_len"):
        if getattr(options, name) < 1:
            parser.error(f"[{name}] expected at least 1, got {getattr(options, name)}")
    options.model = options.model or str(demo_model_path())
    console = Console(width=None if sys.stdout.isatty() else 120)
    result = run(options, console)
    show(result, console)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
