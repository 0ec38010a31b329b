"""What a request gives back: text, tokens, and the metrics of how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import SequenceCounters

__all__ = ["Completion", "Increment", "Logprob", "Metrics", "RequestOutput", "SourceMetrics"]


@dataclass(frozen=True)
class Logprob:
    """One token's raw log-probability: log-softmax of the target's own logits."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


@dataclass(frozen=True)
class Increment:
    """What a stream yields: text that has become certain, and the tokens chosen since."""

    text: str
    token_ids: list[int]
    index: int = 0
    """Whose, of the n outputs."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Where asked for, one entry for each of these tokens."""
    finish_reason: str = ""
    """Empty but in this output's last increment, whose text and tokens may be empty."""


@dataclass(frozen=True)
class SourceMetrics:
    """What one drafter's nodes came to; a node that several proposed counts for each."""

    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    """accepted / drafted."""


@dataclass(frozen=True)
class Metrics:
    """How one request went. Rates are 0.0 where there was nothing to count.

    A *round* drafts, verifies in one pass and commits. Prefill's token belongs to no round, so
    completion_tokens = 1 + accepted_tokens + rounds. Position d is depth d of the draft.
    `truncated_rounds` (cut by a stop or a limit) are in the totals and left out of `alpha`,
    `acceptance_length` and the per-position rates.
    """

    prompt_tokens: int = 0
    preemptions: int = 0
    """Times that it gave its KV blocks to others and was computed again."""
    cached_prompt_tokens: int = 0
    """Of the prompt's, found in the prefix cache."""
    completion_tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    """Rounds that had a draft."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_rate: float = 0.0
    """accepted / drafted."""
    alpha: float = 0.0
    """accepted / (accepted + first rejections): the theory's α."""
    acceptance_rate_per_position: list[float] = field(default_factory=list)
    """accepted at d / rounds that drafted to d."""
    alpha_per_position: list[float] = field(default_factory=list)
    """accepted at d / times that d was reached and decided."""
    drafted_per_position: list[int] = field(default_factory=list)
    """The counts behind these rates, to add up over requests: rounds that drafted to d,"""
    accepted_per_position: list[int] = field(default_factory=list)
    """times that d was accepted,"""
    rejected_per_position: list[int] = field(default_factory=list)
    """and times that d was reached and none of its nodes was right."""
    acceptance_length: float = 0.0
    """τ: tokens per round, the target's own token included."""
    truncated_rounds: int = 0
    draft_seconds: float = 0.0
    """Wall time of the drafting in this request's rounds; shared rounds count whole."""
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    prefill_seconds: float = 0.0
    ttft_seconds: float = 0.0
    """From submission to the first token."""
    tpot_seconds: float = 0.0
    """Mean time per token after the first."""
    total_seconds: float = 0.0
    queue_seconds: float = 0.0
    """From submission to when it first ran."""
    inter_token_seconds: list[float] = field(default_factory=list)
    """Waits between the rounds that gave tokens: as many as such rounds, less one."""
    by_source: InitVar[dict[str, SourceMetrics] | None] = None

    def __post_init__(self, by_source: dict[str, SourceMetrics] | None) -> None:
        object.__setattr__(self, "_sources", dict(by_source or {}))

    @property
    def sources(self) -> dict[str, SourceMetrics]:
        """By who drafted: one entry, or with `Merge` one for each part, truncated rounds too."""
        found: dict[str, SourceMetrics] = self._sources  # type: ignore[attr-defined]
        return found

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first by the time they took."""
        return 1.0 / self.tpot_seconds if self.tpot_seconds > 0 else 0.0

    @property
    def gamma(self) -> float:
        """γ as it was used: draft tokens a round, rounds without a draft among them."""
        return _ratio(self.drafted_tokens, self.rounds)

    @property
    def wasted_tokens(self) -> int:
        """Drafted and not accepted."""
        return self.drafted_tokens - self.accepted_tokens

    @property
    def time_shares(self) -> tuple[float, float, float]:
        """Drafting, verifying and sampling, as shares of what the rounds took."""
        busy = self.draft_seconds + self.verify_seconds + self.sample_seconds
        return (
            _ratio(self.draft_seconds, busy),
            _ratio(self.verify_seconds, busy),
            _ratio(self.sample_seconds, busy),
        )

    @classmethod
    def of(
        cls,
        counters: SequenceCounters,
        *,
        ttft: float = 0.0,
        total: float = 0.0,
        queue: float = 0.0,
        gaps: Sequence[float] = (),
    ) -> Metrics:
        """From the core's counters and the request's own clock, in seconds."""
        after_first = counters.tokens - 1
        return cls(
            prompt_tokens=counters.prompt_tokens,
            preemptions=counters.preemptions,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            completion_tokens=counters.tokens,
            rounds=counters.rounds,
            drafts=counters.drafts,
            drafted_tokens=counters.drafted,
            accepted_tokens=counters.accepted,
            acceptance_rate=_ratio(counters.accepted, counters.drafted),
            alpha=_ratio(
                counters.full_accepted, counters.full_accepted + counters.first_rejections
            ),
            acceptance_rate_per_position=[
                _ratio(a, d) for a, d in zip(counters.accepted_at, counters.drafted_at, strict=True)
            ],
            alpha_per_position=[
                _ratio(a, a + r)
                for a, r in zip(counters.accepted_at, counters.first_rejected_at, strict=True)
            ],
            drafted_per_position=list(counters.drafted_at),
            accepted_per_position=list(counters.accepted_at),
            rejected_per_position=list(counters.first_rejected_at),
            acceptance_length=_ratio(
                counters.full_accepted + counters.full_rounds, counters.full_rounds
            ),
            truncated_rounds=counters.truncated_rounds,
            draft_seconds=counters.draft_seconds,
            verify_seconds=counters.verify_seconds,
            sample_seconds=counters.sample_seconds,
            prefill_seconds=counters.prefill_seconds,
            ttft_seconds=ttft,
            tpot_seconds=(total - ttft) / after_first if after_first > 0 else 0.0,
            total_seconds=total,
            queue_seconds=queue,
            inter_token_seconds=list(gaps),
            by_source={
                one.source: SourceMetrics(
                    one.drafted, one.accepted, _ratio(one.accepted, one.drafted)
                )
                for one in counters.sources
            },
        )

    def __str__(self) -> str:
        parts = [
            f"{self.completion_tokens} tokens: 1 + {self.accepted_tokens} accepted "
            f"+ {self.rounds} rounds"
            if self.completion_tokens
            else "no tokens"
        ]
        if self.acceptance_length:
            parts.append(f"τ {self.acceptance_length:.2f}")
        if self.drafted_tokens:
            parts.append(f"α {self.alpha:.2f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:.0f} tok/s")
        if self.drafted_tokens:
            parts.append(f"drafts {self.time_shares[0]:.0%} of the time")
        return " · ".join(parts)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Completion:
    """One of the n outputs of a request."""

    index: int
    text: str
    """"" where the engine has no tokenizer."""
    token_ids: list[int]
    """The stop token, if one ended the output, is the last."""
    finish_reason: str
    """"stop" (an end token, a stop token or a stop text), "length", or "abort" (cancelled)."""
    stop_reason: int | str | None
    """The stop token or text that the caller had asked for; None for the model's end token."""
    logprobs: list[dict[int, Logprob]] | None
    """A dict a token, the chosen token first, where SamplingParams.logprobs asked for them."""
    metrics: Metrics


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. Its own text, tokens and metrics are those of `outputs[0]`."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    """All n."""
    seed: int
    """Repeats these outputs."""
    lossless: bool
    """True where the texts follow the target's own law: with `coupled`, its own bytes. False with
    `typical` verification, policy "adasd" and synthetic acceptance, always."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One a prompt token, None for the first, where SamplingParams.prompt_logprobs asked."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> Metrics:
        return self.outputs[0].metrics
