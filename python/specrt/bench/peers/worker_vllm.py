"""vLLM's CPU build: worker_vllm.py FOLDER THREADS"""

from __future__ import annotations

import os
import sys

from common import Clock, serve

FOLDER, THREADS = sys.argv[1], int(sys.argv[2])
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ["OMP_NUM_THREADS"] = str(THREADS)

from vllm import LLM, SamplingParams  # noqa: E402


def _load(**options: object) -> LLM:
    return LLM(FOLDER, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, **options)


plain = _load()
ngram = _load(
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
)


def _run(model: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[list[int], float]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    clock = Clock()
    out = model.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return list(out[0].outputs[0].token_ids), clock.seconds()


def decode(prompt: list[int], max_tokens: int, speculate: bool = False) -> dict[str, object]:
    model = ngram if speculate else plain
    _, prefill = _run(model, [prompt], 1)
    tokens, seconds = _run(model, [prompt], max_tokens)
    return {"tokens": tokens, "seconds": seconds - prefill}


def batch(prompts: list[list[int]], max_tokens: int) -> float:
    return _run(plain, prompts, max_tokens)[1]


serve({"decode": decode, "batch": batch})
