"""llama.cpp by llama-cpp-python: worker_llama_cpp.py MODEL.gguf THREADS"""

from __future__ import annotations

import sys

from common import Clock, serve
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

PATH, THREADS = sys.argv[1], int(sys.argv[2])


def _load(**options: object) -> Llama:
    return Llama(
        PATH,
        n_ctx=2048,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        verbose=False,
        **options,
    )


plain = _load()
# The wrapper wants every row's logits where it speculates.
lookup = {
    count: _load(
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=count, max_ngram_size=3),
        logits_all=True,
    )
    for count in (4, 10)
}


def _run(model: Llama, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    """Tokens behind the first, and the seconds that they took."""
    model.reset()
    out: list[int] = []
    clock = Clock()
    started = 0.0
    for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        out.append(int(token))
        if len(out) == 1:
            started = clock.seconds()
        if len(out) == max_tokens:
            break
    return out, clock.seconds() - started


def decode(prompt: list[int], max_tokens: int, speculate: bool = False) -> dict[str, object]:
    runs = lookup.values() if speculate else [plain]
    best = min((_run(model, prompt, max_tokens) for model in runs), key=lambda run: run[1])
    return {"tokens": best[0], "seconds": best[1]}


def rows(prompt: list[int], count: int, repeat: int) -> float:
    model = plain
    model.reset()
    model.eval(prompt)
    length = len(prompt)
    seconds = []
    for turn in range(repeat):
        tokens = [(3 + 7919 * (turn + node)) % model.n_vocab() for node in range(count)]
        clock = Clock()
        model.eval(tokens)
        seconds.append(clock.seconds())
        model._ctx.kv_cache_seq_rm(-1, length, -1)
        model.n_tokens = length
    return sorted(seconds)[len(seconds) // 4]


serve({"decode": decode, "rows": rows})
