"""A few drafts on a short prompt, when an engine is made: they tell a head that is of no use."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from . import _core
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .text import Tokenizer

__all__ = ["self_test"]

PROMPT = "The days of the week are Monday, Tuesday, Wednesday, Thursday, and the months are"
ROUNDS = 16


def self_test(
    decoder: _core.Decoder, drafter: _core.CoreDrafter, tokenizer: Tokenizer, name: str
) -> None:
    """Warn where not one of `ROUNDS` single drafts of a head is accepted.

    A head that is right in a third of all cases fails by chance once in 650 times. It costs a
    short prompt and as many passes; where the decoder has no room for it, there is no test.
    """
    prompt = tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=2 * ROUNDS, ignore_eos=True)
    if not decoder.can_add(len(prompt), params.max_tokens):
        return
    if len(prompt) + params.max_tokens > decoder.max_model_len:
        return
    try:
        accepted, rejected = _decide(decoder, drafter, prompt, params)
    finally:
        decoder.clear_totals()
    if accepted == 0 and rejected > 1:
        warnings.warn(
            f"none of {rejected - 1} drafts of {name} was accepted in a self-test: it may be made "
            "for another target, or be misread; `specrt doctor TARGET DRAFTER` tries how",
            stacklevel=3,
        )


def _decide(
    decoder: _core.Decoder, drafter: _core.CoreDrafter, prompt: list[int], params: SamplingParams
) -> tuple[int, int]:
    """Rounds whose draft was accepted, and those that gave one token; (0, 0) where it ended."""
    sequence = decoder.add(prompt, params.to_core(eos_token_ids=()), drafter)
    accepted = rejected = 0
    for _ in range(ROUNDS + len(prompt)):
        progress = decoder.round(_core.plan_fixed(decoder, 1))
        for _, tokens, _, _, finish, _, error in progress:
            # A prompt's last pass gives one token, and then a round with its draft one or two.
            accepted += len(tokens) > 1
            rejected += len(tokens) == 1
            if finish or error:
                return 0, 0
        if accepted > 0 or rejected > ROUNDS:
            break
    decoder.cancel(sequence)
    return accepted, rejected
