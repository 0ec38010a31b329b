"""What sampling parameters do to a row of logits, as transformers' processors have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def processed(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: dict[str, Any],
    *,
    end_tokens: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """The scores that sampling follows; -inf is a token that may not come.

    `end_tokens` are all that `min_tokens` holds off; `bad_words` are token sequences.
    """
    import torch
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    history = torch.tensor([[*prompt, *output]])
    scores = torch.tensor(np.array(logits, np.float64))[None]
    if "repetition_penalty" in params:
        scores = RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])(history, scores)
    # Not in transformers. As vLLM and OpenAI define them, over the output alone.
    for token, count in Counter(output).items():
        scores[0, token] -= params.get("frequency_penalty", 0.0) * count
        scores[0, token] -= params.get("presence_penalty", 0.0)
    steps = LogitsProcessorList()
    if params.get("logit_bias"):
        bias = [[[token], float(value)] for token, value in params["logit_bias"].items()]
        steps.append(SequenceBiasLogitsProcessor(bias))
    if params.get("allowed_token_ids"):
        others = sorted(set(range(scores.shape[-1])) - set(params["allowed_token_ids"]))
        steps.append(SuppressTokensLogitsProcessor(others))
    if bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(one) for one in bad_words]))
    if params.get("min_tokens") and end_tokens:
        least = params["min_tokens"]
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, list(end_tokens)))
    if params.get("temperature", 0.0) > 0.0:
        for name, warper in (
            ("temperature", TemperatureLogitsWarper),
            ("top_k", TopKLogitsWarper),
            ("top_p", TopPLogitsWarper),
            ("min_p", MinPLogitsWarper),
        ):
            if name in params:
                steps.append(warper(params[name]))
    return steps(history, scores)[0].numpy()


def target_logits(path: Any, tokens: Sequence[int]) -> np.ndarray:
    """The raw logits behind every token of a text, from transformers in one pass."""
    import torch

    with torch.no_grad():
        return _model(str(path))(torch.tensor([list(tokens)])).logits[0].double().numpy()


_MODELS: dict[str, Any] = {}


def _model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    if path not in _MODELS:
        _MODELS[path] = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    return _MODELS[path]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Row by row, in double precision."""
    scores = np.asarray(scores, np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def assert_law(counts: np.ndarray, law: np.ndarray, what: Any) -> None:
    """Chi-square at 1e-4. Seeds are fixed, so this passes always or never."""
    law = law.ravel()
    counts = counts.ravel()
    assert counts[law == 0].sum() == 0, f"{what}: impossible tokens"
    statistic, freedom = chi_square(counts, law)
    if freedom == 0:
        return
    # Wilson and Hilferty's approximation of the quantile; 3.719 is the normal one.
    part = 2 / (9 * freedom)
    limit = freedom * (1 - part + 3.719 * part**0.5) ** 3
    assert statistic < limit, f"{what}: chi-square {statistic:.1f} > {limit:.1f}"


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom, cells that expect less than 8 taken together."""
    expected = law * counts.sum()
    rare = expected < 8
    seen = [*counts[~rare], counts[rare].sum()]
    wanted = [*expected[~rare], expected[rare].sum()]
    if wanted[-1] < 8:  # too few for a cell of their own
        seen[-2:] = [seen[-2] + seen[-1]]
        wanted[-2:] = [wanted[-2] + wanted[-1]]
    return float(sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))), len(seen) - 1
