"""What Python takes of a round, and what a drafter costs that is switched off.

    python bench/overheads.py python
    python bench/overheads.py off --pairs 40

`python`: wall time of rounds less what the core takes for planning and running them, by number of
sequences, submitted and read as a server would. The bound is 50 µs and 5 µs a sequence.
`off`: an engine with policy "off" against one without a drafter, by turns; the mean ratio of
tokens a second and its 95 % interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from specrt import Engine, SamplingParams, _core
from specrt.bench.stats import mean_interval
from specrt.demo import demo_model_path
from specrt.scheduler import Scheduler

BOUND = (50e-6, 5e-6)
"""Seconds a round, and a sequence in it."""


class Stopwatch:
    """Seconds spent inside calls, and how many there were."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


def bound(count: int) -> float:
    """Seconds of Python that a round of so many sequences may take."""
    return BOUND[0] + count * BOUND[1]


def python_of_rounds(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[int, float]:
    """Rounds in which all are answered, and seconds of Python in one."""
    core, whole = Stopwatch(), Stopwatch()
    with ExitStack() as changes:
        for name in ("round", "reserve"):
            timed = core.around(getattr(_core.Decoder, name))
            changes.enter_context(patch.object(_core.Decoder, name, timed))
        timed = core.around(_core.plan_policies)
        changes.enter_context(patch.object(_core, "plan_policies", timed))
        changes.enter_context(patch.object(Scheduler, "step", whole.around(Scheduler.step)))
        handles = [engine.submit(prompt, params) for prompt in prompts]
        for one in handles:
            one.result()
    return whole.calls, (whole.seconds - core.seconds) / whole.calls


def python_share(model: str, drafter: str | None, rounds: int) -> bool:
    fine = True
    for count in (1, 4, 16, 64):
        with Engine(model, drafter, max_batch_size=count, max_model_len=1024) as engine:
            params = SamplingParams(max_tokens=rounds, temperature=0.0, ignore_eos=True)
            prompts = [[5 + row, 6, 7] for row in range(count)]
            engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
            seen, share = python_of_rounds(engine, prompts, params)
        fine = fine and share <= bound(count)
        print(
            f"{count:3} sequences  {seen} rounds  {1e6 * share:6.1f} µs of Python a round, bound "
            f"{1e6 * bound(count):.0f}"
        )
    return fine


def off(model: str, pairs: int, tokens: int) -> bool:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompt = "Tell me a story about a lighthouse."
    ratios = []
    with Engine(model) as plain, Engine(model, "ngram", policy="off") as switched_off:
        for pair in range(pairs + 1):
            seconds = {}
            for engine in (plain, switched_off) if pair % 2 else (switched_off, plain):
                began = time.perf_counter()
                engine.generate(prompt, params)
                seconds[engine] = time.perf_counter() - began
            if pair:  # the first warms up
                ratios.append(seconds[plain] / seconds[switched_off])
    found = mean_interval(ratios)
    print(f"off over plain, tokens a second: {found} ({pairs} pairs of {tokens} tokens)")
    return found.high >= 0.99


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["python", "off"])
    parser.add_argument("--model", help="the demo's unless given")
    parser.add_argument("--drafter")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    model = asked.model or str(demo_model_path())
    if asked.what == "python":
        fine = python_share(model, asked.drafter, asked.rounds)
    else:
        fine = off(model, asked.pairs, asked.tokens)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
