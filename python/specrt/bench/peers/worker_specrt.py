"""specrt as one of the engines: worker_specrt.py MODEL.gguf DTYPE THREADS [ISA]"""

from __future__ import annotations

import sys

from common import Clock, serve

from specrt import Engine, SamplingParams, drafters
from specrt.bench.kernels import Noise, time_rounds

PATH, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
ISA = sys.argv[4] if len(sys.argv) > 4 else "auto"


def _engine(drafter: object, tokens: int, **options: object) -> Engine:
    return Engine(
        PATH,
        drafter,
        **options,
        dtype=DTYPE,
        threads=THREADS,
        cpu_isa=ISA,
        max_model_len=2048,
        num_speculative_tokens=tokens,
        enable_prefix_caching=False,
    )


plain = _engine(None, 0)
noise = Noise(plain.tokenizer.vocab_size)
ngram = _engine(drafters.NGram(), 16, policy="fixed")
wide = _engine(noise, 63, policy="fixed")


def decode(prompt: list[int], max_tokens: int, speculate: bool = False) -> dict[str, object]:
    engine = ngram if speculate else plain
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    out = engine.generate(prompt, params)
    return {
        "tokens": out.token_ids,
        "seconds": out.metrics.total_seconds - out.metrics.ttft_seconds,
        "acceptance_length": out.metrics.acceptance_length,
    }


def answer(prompt: list[int], max_tokens: int) -> dict[str, float]:
    """Where the answer ends by itself, and what n-gram drafts come to until then."""
    out = ngram.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return {"length": len(out.token_ids), "acceptance_length": out.metrics.acceptance_length}


def rows(prompt: list[int], count: int, repeat: int) -> float:
    """Seconds of a round of `count` rows, everything around the pass included."""
    noise.rows = count
    seconds = [one for _, one in time_rounds(wide, prompt, count, repeat)]
    return sorted(seconds)[len(seconds) // 4]


def batch(prompts: list[list[int]], max_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    clock = Clock()
    plain.generate(prompts, params)
    return clock.seconds()


serve({"answer": answer, "decode": decode, "rows": rows, "batch": batch})
