"""specrt as one of the engines: worker_specrt.py MODEL.gguf DTYPE THREADS [ISA]"""

from __future__ import annotations

import sys

from common import Clock, serve

from specrt import Drafter, DraftTree, Engine, RequestOutput, SamplingParams, drafters

PATH, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
ISA = sys.argv[4] if len(sys.argv) > 4 else "auto"


class Noise(Drafter):
    """A chain that is never right, to make passes of a given number of rows."""

    rows = 1

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        nodes = range(min(budget, self.rows - 1))
        return DraftTree.chain([3 + (7919 * (len(tokens) + node)) % 40000 for node in nodes])

    def observe(self, committed: list[int]) -> None:
        pass


def _engine(drafter: object, tokens: int) -> Engine:
    return Engine(
        PATH,
        drafter,
        dtype=DTYPE,
        threads=THREADS,
        cpu_isa=ISA,
        max_model_len=2048,
        num_speculative_tokens=tokens,
        enable_prefix_caching=False,
        policy="fixed",  # the noise never stops
    )


noise = Noise()
plain = _engine(None, 0)
ngram = _engine(drafters.NGram(), 16)
wide = _engine(noise, 63)


def _behind_the_first(
    engine: Engine, prompt: list[int], max_tokens: int
) -> tuple[RequestOutput, float]:
    """An output, and the seconds between its first token and its last."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    stream = engine.stream(prompt, params)
    next(stream)
    clock = Clock()
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value, clock.seconds()


def decode(prompt: list[int], max_tokens: int, speculate: bool = False) -> dict[str, object]:
    out, seconds = _behind_the_first(ngram if speculate else plain, prompt, max_tokens)
    return {
        "tokens": list(out.token_ids),
        "seconds": seconds,
        "acceptance_length": out.metrics.acceptance_length,
    }


def answer(prompt: list[int], max_tokens: int) -> dict[str, float]:
    """Where the answer ends by itself, and what n-gram drafts come to until then."""
    out = ngram.generate([prompt], SamplingParams(temperature=0.0, max_tokens=max_tokens))[0]
    return {"length": len(out.token_ids), "acceptance_length": out.metrics.acceptance_length}


def rows(prompt: list[int], count: int, repeat: int) -> float:
    """Seconds of a round of `count` rows, everything around the pass included."""
    noise.rows = count
    return _behind_the_first(wide, prompt, repeat + 1)[1] / repeat


def batch(prompts: list[list[int]], max_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    clock = Clock()
    plain.generate(prompts, params)
    return clock.seconds()


serve({"answer": answer, "decode": decode, "rows": rows, "batch": batch})
