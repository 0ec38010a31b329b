"""One output of a request inside an engine, from its submission to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from .errors import NumericError, SpecrtError
from .outputs import Completion, Increment, Metrics, RequestOutput
from .transcript import Transcript

if TYPE_CHECKING:
    from ._core import CoreSamplingParams, SequenceCounters
    from .delivery import Delivery
    from .sampling import SamplingParams
    from .structured import GrammarState
    from .text import Tokenizer
    from .transcript import RawLogprobs

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
    """Where its news go."""
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    times: list[float] = field(default_factory=list)
    """When rounds gave it tokens."""
    finished: float | None = None
    counters: SequenceCounters | None = None

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.params, self.tokenizer, self.stop_ids)
        self.looks_for_stops = self.transcript.looks_for_stops

    @property
    def done(self) -> bool:
        return bool(self.finish_reason) or self.error is not None

    @property
    def may_start(self) -> bool:
        return self.after is None or self.after.done or bool(self.after.times)

    @property
    def first_token(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def last_token(self) -> float | None:
        return self.times[-1] if self.times else None

    @property
    def token_count(self) -> int:
        return self.transcript.count

    def feed(self, now: float, tokens: list[int], logprobs: RawLogprobs | None) -> None:
        """Take the tokens of a round."""
        self.times.append(now)
        if logprobs is None:
            self.transcript.parts.append(tokens)
        else:
            self.transcript.add(tokens, logprobs)

    def end(self, finish: str, counters: SequenceCounters | None, *, told: bool) -> None:
        """The core is done with it, or a stop text was found. told: of all its tokens already."""
        self.counters = counters
        self.finish_reason = self.transcript.end(finish, told=told)
        self.stop_reason = self.transcript.stop_text
        if self.stop_reason is None and finish == "stop" and self.params.stop_token_ids:
            last = self.transcript.parts[-1][-1:]
            self.stop_reason = last[0] if last and last[0] in self.params.stop_token_ids else None

    def failure(self, message: str) -> SpecrtError:
        """The core's message as an error of this request."""
        kind = NumericError if message.startswith("[logits]") else SpecrtError
        return kind(f"request of {len(self.prompt)} prompt tokens: {message}")

    def increment(self) -> Increment | None:
        """What the next of its rounds gave; None where its text cannot be made."""
        return self.transcript.increment(self.index)

    @property
    def failed_with(self) -> SpecrtError | None:
        """Its error, or its text's, as far as that has been made."""
        return self.error or self.transcript.error

    def metrics(self) -> Metrics:
        if self.counters is None:
            return Metrics(prompt_tokens=len(self.prompt))
        times = self.times or [self.arrived]
        return Metrics.of(
            self.counters,
            ttft=times[0] - self.arrived,
            total=times[-1] - self.arrived,
            queue=(self.admitted or self.arrived) - self.arrived,
            gaps=[after - before for before, after in pairwise(self.times)],
        )

    def completion(self) -> Completion:
        """The output. Raises the request's own error where it has one."""
        if self.error is not None:
            raise self.error
        return Completion(
            index=self.index,
            text=self.transcript.text,
            token_ids=self.transcript.tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.transcript.logprobs,
            metrics=self.metrics(),
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
        prompt_logprobs=first.transcript.prompt_logprobs,
    )
