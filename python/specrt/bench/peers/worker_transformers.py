"""transformers on torch: worker_transformers.py FOLDER DTYPE THREADS"""

from __future__ import annotations

import sys

import torch
from common import Clock, serve
from transformers import AutoModelForCausalLM

FOLDER, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(THREADS)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, DTYPE)).eval()


def _generate(prompts: list[list[int]], max_tokens: int, **options: object) -> torch.Tensor:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            **options,
        )


def decode(prompt: list[int], max_tokens: int, speculate: bool = False) -> dict[str, object]:
    options = {"prompt_lookup_num_tokens": 10} if speculate else {}
    one = Clock()
    _generate([prompt], 1)
    prefill = one.seconds()
    clock = Clock()
    out = _generate([prompt], max_tokens, **options)
    return {"tokens": out[0, len(prompt) :].tolist(), "seconds": clock.seconds() - prefill}


def rows(prompt: list[int], count: int, repeat: int) -> float:
    seconds = []
    vocab = model.config.vocab_size
    with torch.inference_mode():
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        for turn in range(repeat):
            ids = torch.tensor([[(3 + 7919 * (turn + node)) % vocab for node in range(count)]])
            clock = Clock()
            model(ids, past_key_values=cache, use_cache=True)
            seconds.append(clock.seconds())
            cache.crop(len(prompt))
    return sorted(seconds)[len(seconds) // 4]


def batch(prompts: list[list[int]], max_tokens: int) -> float:
    clock = Clock()
    _generate(prompts, max_tokens)
    return clock.seconds()


serve({"decode": decode, "rows": rows, "batch": batch})
