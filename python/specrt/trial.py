"""What a target accepts of a drafter's chains, tried on a decoder that has nothing else to do."""

from __future__ import annotations

from collections.abc import Sequence

from . import _core
from .errors import SpecrtError
from .sampling import SamplingParams

__all__ = ["try_chains"]


def try_chains(
    decoder: _core.Decoder,
    drafter: _core.CoreDrafter,
    prompts: Sequence[list[int]],
    *,
    tokens: int,
    gamma: int,
    rounds: int | None = None,
) -> list[_core.SequenceCounters]:
    """Answer prompts greedily with `tokens` each, `gamma` draft tokens a round; the counters.

    rounds: None runs to the end; else it is over after so many rounds with drafts, or once a draft
    was accepted. Nothing is left running. Raises SpecrtError with the first sequence's own error.
    """
    params = SamplingParams(max_tokens=tokens, ignore_eos=True).to_core(eos_token_ids=())
    running: list[int] = []
    ended: list[_core.SequenceCounters] = []
    tried = 0
    over = False
    try:
        for prompt in prompts:
            running.append(decoder.add(prompt, params, drafter))
        while running and not over:
            failed = ""
            for sequence, new, _, _, finish, counters, error in decoder.round(
                _core.plan_fixed(decoder, gamma)
            ):
                if finish or error:
                    running.remove(sequence)
                if counters is not None:
                    ended.append(counters)
                failed = failed or error
                # One token for a prompt's last pass; then, a round, one and what was accepted.
                tried += len(new) > 0
                over = over or (
                    rounds is not None and (len(new) > 1 or tried > rounds * len(prompts))
                )
            if failed:
                raise SpecrtError(failed)
    finally:
        ended += [decoder.cancel(sequence) for sequence in running]
    return ended
