"""One output of a request inside an engine: from the tokens of each round to text and metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import NumericError, SpecrtError
from .outputs import Completion, Increment, Logprob, Metrics, RequestOutput

if TYPE_CHECKING:
    from ._core import CoreSamplingParams, SequenceCounters
    from .delivery import Delivery
    from .sampling import SamplingParams
    from .structured import GrammarState
    from .text import Detokenizer, Tokenizer

    RawLogprobs = list[tuple[float, int, list[tuple[int, float]]]]

__all__ = ["Request", "request_output"]


@dataclass(eq=False)
class Request:
    """State of one output. The scheduler feeds it; whoever waits for it reads it.

    Times are of `time.monotonic`.
    """

    prompt: list[int]
    params: SamplingParams
    core_params: CoreSamplingParams
    tokenizer: Tokenizer | None
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output; a grammar may end it with any other."""
    index: int = 0
    """Among the n outputs of one prompt."""
    constraint: GrammarState | None = None
    after: Request | None = None
    """Starts once this one has its first token: then the prompt's blocks can be shared."""
    lossless: bool = True
    id: int | None = None
    """The core's sequence, once running."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: SpecrtError | None = None
    stop_reason: int | str | None = None
    priority: int = 0
    """The smaller, the sooner."""
    arrival: int = 0
    """Its place in the order of submission."""
    overtaken: int = 0
    """Requests admitted before it that came after it."""
    preemptions: int = 0
    preempted: bool = False
    """It has run and waits to go on."""
    delivery: Delivery | None = None
    """Where its increments go."""
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Seconds between the rounds that gave tokens."""
    counters: SequenceCounters | None = None

    _text: list[str] = field(default_factory=list)
    _tail: str = ""
    """Text that a stop text might still begin in."""
    _told_text: int = 0
    """Pieces of text that have left as increments,"""
    _told_tokens: int = 0
    """and tokens."""
    _told_finish: bool = False
    _logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    _prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    _detokenizer: Detokenizer | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self._detokenizer = self.tokenizer.detokenizer(
                skip_special_tokens=self.params.skip_special_tokens
            )
        self._longest_stop = max((len(one) for one in self.params.stop_texts), default=0)

    @property
    def done(self) -> bool:
        return bool(self.finish_reason) or self.error is not None

    @property
    def may_start(self) -> bool:
        return self.after is None or self.after.done or self.after.first_token is not None

    def tell_prompt(self, logprobs: RawLogprobs) -> None:
        """Log-probabilities of the prompt's tokens but the first."""
        for token, raw in zip(self.prompt[1:], logprobs, strict=True):
            self._prompt_logprobs.append(self._named(token, raw))

    def feed(self, tokens: list[int], logprobs: RawLogprobs | None, finish: str) -> int:
        """Take the tokens of a round. Returns how many at its end a stop text cuts off, else -1.

        `finish` is the core's verdict after the last of them.
        """
        now = time.monotonic()
        if tokens:
            self.first_token = now if self.first_token is None else self.first_token
            if self.last_token is not None:
                self.gaps.append(now - self.last_token)
            self.last_token = now
        if logprobs is None and not finish and not self._longest_stop:  # most rounds
            self.token_ids += tokens
            if self._detokenizer is not None:
                for token in tokens:
                    if text := self._detokenizer.feed(token):
                        self._text.append(text)
            return -1
        for index, token in enumerate(tokens):
            last = index + 1 == len(tokens)
            self.token_ids.append(token)
            if logprobs is not None:
                self._logprobs.append(self._named(token, logprobs[index]))
            ends_here = last and finish == "stop"
            if ends_here and token in (self.params.stop_token_ids or ()):
                self.stop_reason = token
            stops_text = ends_here and token in self.stop_ids
            if stops_text and not self.params.include_stop_str_in_output:
                continue  # the stop token's own text is no part of the answer
            if self._detokenizer is not None and self._add(self._detokenizer.feed(token)):
                self.finish_reason = "stop"
                return len(tokens) - 1 - index
        return -1

    def end(self, finish: str, counters: SequenceCounters | None) -> None:
        """The core is done with it (or a stop text was found): settle text and counters."""
        self.counters = counters
        if not self.finish_reason:
            if self._detokenizer is not None and self._add(self._detokenizer.flush()):
                finish = "stop"
            self.finish_reason = finish
        if self._tail:
            self._text.append(self._tail)
            self._tail = ""

    def failure(self, message: str) -> SpecrtError:
        """The core's message as an error of this request."""
        kind = NumericError if message.startswith("[logits]") else SpecrtError
        return kind(f"request of {len(self.prompt)} prompt tokens: {message}")

    def _add(self, text: str) -> bool:
        """Add text; True where it completes a stop text, which ends the output there."""
        if not self._longest_stop:
            if text:
                self._text.append(text)
            return False
        old = len(self._tail)
        pending = self._tail + text
        # What had ended before min_tokens is no stop any more: a stop text ends in the new text.
        found = [
            (at, one)
            for one in self.params.stop_texts
            if (at := pending.find(one, max(0, old - len(one) + 1))) >= 0
        ]
        if found and len(self.token_ids) >= self.params.min_tokens:
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self.stop_reason = stop
            self._tail = ""
            end = at + len(stop) if self.params.include_stop_str_in_output else at
            if pending[:end]:
                self._text.append(pending[:end])
            return True
        # Hold back the longest end that a stop text may begin with.
        hold = 0
        for size in range(min(len(pending), self._longest_stop - 1), 0, -1):
            if any(one.startswith(pending[-size:]) for one in self.params.stop_texts):
                hold = size
                break
        ready = pending[: len(pending) - hold]
        self._tail = pending[len(pending) - hold :]
        if ready:
            self._text.append(ready)
        return False

    def _named(
        self, token: int, raw: tuple[float, int, list[tuple[int, float]]]
    ) -> dict[int, Logprob]:
        logprob, rank, top = raw
        named = {token: Logprob(logprob, rank, self._string(token))}
        for place, (other, value) in enumerate(top):
            if other not in named:
                named[other] = Logprob(value, place + 1, self._string(other))
        return named

    def _string(self, token: int) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def increment(self) -> Increment | None:
        """What is new since the last call; None where nothing is."""
        text = "".join(self._text[self._told_text :])
        tokens = self.token_ids[self._told_tokens :]
        finish = "" if self._told_finish else self.finish_reason
        if not text and not tokens and not finish:
            return None
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = self._logprobs[self._told_tokens :]
        self._told_text = len(self._text)
        self._told_tokens = len(self.token_ids)
        self._told_finish = bool(finish)
        return Increment(text, tokens, self.index, logprobs, finish)

    def completion(self) -> Completion:
        """The output. Raises the request's own error where it has one."""
        if self.error is not None:
            raise self.error
        if self.counters is None:
            metrics = Metrics(prompt_tokens=len(self.prompt))
        else:
            first = self.first_token if self.first_token is not None else self.arrived
            last = self.last_token if self.last_token is not None else self.arrived
            metrics = Metrics.of(
                self.counters,
                ttft=first - self.arrived,
                total=last - self.arrived,
                queue=(self.admitted or self.arrived) - self.arrived,
                gaps=self.gaps,
            )
        return Completion(
            index=self.index,
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else self._logprobs,
            metrics=metrics,
        )


def request_output(samples: list[Request]) -> RequestOutput:
    """The n outputs of one prompt together. Raises the first error among them."""
    first = samples[0]
    assert first.params.seed is not None
    return RequestOutput(
        prompt_token_ids=first.prompt,
        outputs=[one.completion() for one in samples],
        seed=first.params.seed,
        lossless=first.lossless,
        prompt_logprobs=(
            None if first.params.prompt_logprobs is None else [None, *first._prompt_logprobs]
        ),
    )
