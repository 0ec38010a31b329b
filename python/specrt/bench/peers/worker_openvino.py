"""OpenVINO GenAI: worker_openvino.py MODEL.gguf THREADS"""

from __future__ import annotations

import sys

import numpy as np
import openvino_genai as genai
from common import Clock, serve
from openvino import Tensor

PATH, THREADS = sys.argv[1], int(sys.argv[2])
OPTIONS = {"INFERENCE_NUM_THREADS": THREADS}
plain = genai.LLMPipeline(PATH, "CPU", **OPTIONS)
try:
    lookup = genai.LLMPipeline(PATH, "CPU", prompt_lookup=True, **OPTIONS)
except Exception as error:  # not every format has it
    print("no prompt lookup:", error, file=sys.stderr)
    lookup = None


def _config(max_tokens: int, speculate: bool) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.min_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    if speculate:
        config.num_assistant_tokens = 8
        config.max_ngram_size = 3
    return config


def decode(prompt: list[int], max_tokens: int, speculate: bool = False) -> dict[str, object]:
    pipeline = lookup if speculate else plain
    if pipeline is None:
        raise RuntimeError("no prompt lookup for this model")
    inputs = Tensor(np.array([prompt], dtype=np.int64))
    one = Clock()
    pipeline.generate(inputs, _config(1, speculate))
    prefill = one.seconds()
    clock = Clock()
    out = pipeline.generate(inputs, _config(max_tokens, speculate))
    return {"tokens": list(out.tokens[0]), "seconds": clock.seconds() - prefill}


serve({"decode": decode})
