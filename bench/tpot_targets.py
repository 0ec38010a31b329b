"""Whether targets of time per token are met that some fixed policy meets.

    python bench/tpot_targets.py --concurrency 32 --requests 96 --repeats 2

In each repetition plain decoding and each fixed γ take their turns; the lowest 97th percentile of
their requests' seconds per token after the first, times `--slack`, is the target. Then come goodput
with that target, the policy that set it once more, which tells how steady the machine is, and
goodput without a target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from specrt import SamplingParams, Speculation
from specrt.bench.load import Level, run_level
from specrt.bench.prompts import builtin_prompts
from specrt.bench.targets import Contender, Target, contenders
from specrt.engine_metrics import percentiles
from specrt.outputs import RequestOutput

MET = 0.95
"""Share of the requests that have to meet their target."""


def tpots(outputs: Sequence[RequestOutput]) -> list[float]:
    return [one.metrics.tpot_seconds for one in outputs]


def measure(asked: argparse.Namespace) -> bool:
    competing = contenders([asked.drafter], ["goodput"], asked.gamma)
    goodput = competing[-1]
    level = Level(concurrency=asked.concurrency)
    count = asked.requests or 3 * asked.concurrency
    met: dict[str, list[bool]] = {}
    with Target(asked.model) as target, ExitStack() as stack:
        prompts = target.encode(builtin_prompts())
        engines = {
            one.name: stack.enter_context(
                target.engine(one, max_batch_size=asked.concurrency, enable_prefix_caching=False)
            )
            for one in competing
        }

        def run(one: Contender, turn: int, goal: float | None = None) -> list[float]:
            of_turn = count if turn else max(4, count // 4)  # the first warms up
            work = [prompts[(turn * count + place) % len(prompts)] for place in range(of_turn)]
            params = SamplingParams(
                max_tokens=asked.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                speculation=Speculation(target_tpot_seconds=goal) if goal else None,
            )
            return tpots(run_level(engines[one.name], level, work, params, seed=turn).outputs)

        for turn in range(asked.repeats + 1):
            shift = turn % len(competing[:-1])
            fixed = competing[shift:-1] + competing[:shift]
            found = {one.name: percentiles(run(one, turn), (97,))[0] for one in fixed}
            if turn == 0:
                run(goodput, turn)
                continue
            best = min(fixed, key=lambda one: found[one.name])
            goal = asked.slack * found[best.name]
            for name, one, own in (
                ("goodput", goodput, goal),
                ("the fixed policy again", best, None),
                ("goodput without a target", goodput, None),
            ):
                met.setdefault(name, []).extend(tpot <= goal for tpot in run(one, turn, own))
            print(
                f"turn {turn}: {1e3 * goal:.1f} ms, by {best.name}; "
                + ", ".join(
                    f"{name} {sum(each[-count:])} of {count}" for name, each in met.items()
                ),
                flush=True,
            )
    for name, each in met.items():
        print(f"{name}: {sum(each)} of {len(each)}, {sum(each) / len(each):.1%}")
    each = met["goodput"]
    return sum(each) >= MET * len(each)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="the demo's unless given")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 3, 5, 7])
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, help="of a turn; three times the concurrency")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slack", type=float, default=1.1)
    return 0 if measure(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
