"""A few drafts on a short prompt, when an engine is made: they tell a head that is of no use."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from . import _core
from .errors import SpecrtError
from .trial import try_chains

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
    most = 2 * ROUNDS
    if not decoder.can_add(len(prompt), most) or len(prompt) + most > decoder.max_model_len:
        return
    try:
        (counters,) = try_chains(decoder, drafter, [prompt], tokens=most, gamma=1, rounds=ROUNDS)
    except SpecrtError:
        return  # what ends a sequence is told to whoever asks for one
    finally:
        decoder.clear_totals()
    if counters.accepted == 0 and counters.rounds > 0:
        warnings.warn(
            f"none of {counters.rounds} drafts of {name} was accepted in a self-test: it may be "
            "made for another target, or be misread; `specrt doctor TARGET DRAFTER` tries how",
            stacklevel=3,
        )
