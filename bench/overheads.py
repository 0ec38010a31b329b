"""What Python takes of a round, and what a drafter costs that is switched off.

    python bench/overheads.py python
    python bench/overheads.py off --pairs 400

`python`: wall time between the core's rounds, by number of sequences, waited for and, as a server
would, read as they come. The bound is 50 µs and 5 µs a sequence.
`off`: an engine with policy "off" against one without a drafter, by turns; the mean ratio of
tokens a second and its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from specrt import Engine, SamplingParams, _core
from specrt.bench.prompts import BenchPrompt
from specrt.bench.stats import mean_interval
from specrt.bench.targets import PLAIN, Contender, Target
from specrt.demo import demo_model_path

BOUND = (50e-6, 5e-6)
"""Seconds a round, and a sequence in it."""
PAIRS_OF_ENGINES = 20


class Between:
    """Seconds between calls, and how many such times there were."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._ended: float | None = None

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._ended is not None:
                self.seconds += time.perf_counter() - self._ended
            self.calls += 1
            try:
                return call(*arguments)
            finally:
                self._ended = time.perf_counter()

        return timed


def bound(count: int) -> float:
    """Seconds of Python that a round of so many sequences may take."""
    return BOUND[0] + count * BOUND[1]


async def read(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """All of them, token by token."""

    async def one(prompt: list[int]) -> None:
        async for _ in engine.submit(prompt, params):
            pass

    await asyncio.gather(*map(one, prompts))


def wait(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    for handle in [engine.submit(prompt, params) for prompt in prompts]:
        handle.result()


def python_of_rounds(work: Callable[[], None]) -> tuple[int, float]:
    """Rounds in which it is done, one at least, and seconds from one's end to the next one's start:
    what Python does in a round, who runs it included."""
    rounds = Between()
    with patch.object(_core.Decoder, "policy_round", rounds.around(_core.Decoder.policy_round)):
        work()
    return rounds.calls, rounds.seconds / max(1, rounds.calls - 1)


def python_share(model: str, drafter: str | None, rounds: int) -> bool:
    fine = True
    for count in (1, 4, 16, 64):
        with Engine(model, drafter, max_batch_size=count, max_model_len=1024) as engine:
            params = SamplingParams(max_tokens=rounds, temperature=0.0, ignore_eos=True)
            prompts = [[5 + row, 6, 7] for row in range(count)]
            engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
            given = (engine, prompts, params)
            seen, waited = python_of_rounds(lambda: wait(*given))  # noqa: B023
            _, streamed = python_of_rounds(lambda: asyncio.run(read(*given)))  # noqa: B023
        fine = fine and max(waited, streamed) <= bound(count)
        print(
            f"{count:3} sequences  {seen} rounds  {1e6 * waited:6.1f} µs of Python a round, "
            f"{1e6 * streamed:6.1f} streamed, bound {1e6 * bound(count):.0f}"
        )
    return fine


def off(model: str, pairs: int, tokens: int) -> bool:
    """Both engines map the same weights, and are made anew now and then: where memory happens to
    lie tells two engines that are the same apart by several percent."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    competing = (PLAIN, Contender("off", "ngram", "off"))
    ratios: list[float] = []
    with Target(model) as target:
        (prompt,) = target.encode([BenchPrompt("1", "own", "Tell me a story about a lighthouse.")])
        while len(ratios) < pairs:
            order = competing if len(ratios) // PAIRS_OF_ENGINES % 2 else competing[::-1]
            with ExitStack() as stack:
                engines = {
                    one: stack.enter_context(target.engine(one, max_batch_size=1)) for one in order
                }
                for pair in range(PAIRS_OF_ENGINES + 1):
                    seconds = {}
                    for one in order if pair % 2 else order[::-1]:
                        began = time.perf_counter()
                        engines[one].generate(prompt, params)
                        seconds[one] = time.perf_counter() - began
                    if pair:  # the first warms up
                        ratios.append(seconds[PLAIN] / seconds[competing[1]])
    found = mean_interval(ratios)
    print(f"off over plain, tokens a second: {found} ({len(ratios)} pairs of {tokens} tokens)")
    return found.high >= 0.99


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["python", "off"])
    parser.add_argument("--model", help="the demo's unless given")
    parser.add_argument("--drafter")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=24)
    asked = parser.parse_args()
    model = asked.model or str(demo_model_path())
    if asked.what == "python":
        fine = python_share(model, asked.drafter, asked.rounds)
    else:
        fine = off(model, asked.pairs, asked.tokens)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
