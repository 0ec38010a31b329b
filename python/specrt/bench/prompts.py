"""The prompts that specrt's benchmarks run, and sums over many requests' metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..outputs import Metrics

__all__ = ["BenchPrompt", "Totals", "builtin_prompts", "read_prompts"]


@dataclass(frozen=True)
class BenchPrompt:
    """One user message."""

    id: str
    kind: str
    """Of the built-in set "chat", "code", "rewrite", "summarise" or "answer"; else "own"."""
    text: str


def builtin_prompts() -> list[BenchPrompt]:
    """Forty prompts of five kinds, eight each."""
    file = resources.files("specrt") / "data" / "prompts.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return [BenchPrompt(**one) for one in found["prompts"]]


def read_prompts(path: Path) -> list[BenchPrompt]:
    """One's own: `.jsonl` with {"prompt": text, "kind": optional} a line, else a prompt a line.

    Raises LoadError, with the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"[prompts] cannot read {path}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, kind = line, "own"
        if path.suffix == ".jsonl":
            try:
                entry = json.loads(line)
                text, kind = entry["prompt"], entry.get("kind", "own")
                if not isinstance(text, str) or not isinstance(kind, str) or not text:
                    raise TypeError("expected texts")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise LoadError(
                    f'[prompts] line {number} of {path}: expected {{"prompt": text}}: {error}'
                ) from error
        found.append(BenchPrompt(f"{kind}-{number}", kind, text))
    if not found:
        raise LoadError(f"[prompts] expected at least one prompt in {path}, got none")
    return found


@dataclass(frozen=True)
class Totals:
    """Metrics of several requests together, as `Metrics` defines each."""

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_length: float
    """τ over all rounds that no limit cut."""
    alpha: float
    alpha_per_position: list[float]
    decode_seconds: float
    """From first to last tokens, added up."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0

    @property
    def gamma(self) -> float:
        """γ as it was used: draft tokens a round."""
        return self.drafted / self.rounds if self.rounds else 0.0

    @property
    def wasted(self) -> float:
        """The share of drafted tokens that were not accepted."""
        return 1 - self.accepted / self.drafted if self.drafted else 0.0

    @property
    def time_shares(self) -> tuple[float, float, float]:
        """Drafting, verifying and sampling, as shares of the three together."""
        busy = self.draft_seconds + self.verify_seconds + self.sample_seconds
        if not busy:
            return 0.0, 0.0, 0.0
        parts = (self.draft_seconds, self.verify_seconds, self.sample_seconds)
        draft, verify, sample = (one / busy for one in parts)
        return draft, verify, sample

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed of one request at a time: tokens after the first by their time."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @classmethod
    def of(cls, metrics: Iterable[Metrics]) -> Totals:
        """The sum; a request that gave no token counts for nothing."""
        each = [one for one in metrics if one.completion_tokens > 0]
        full = sum(one.rounds - one.truncated_rounds for one in each)
        kept = sum(one.acceptance_length * (one.rounds - one.truncated_rounds) for one in each)
        depth = max((len(one.accepted_per_position) for one in each), default=0)
        accepted = [0] * depth
        rejected = [0] * depth
        for one in each:
            for d, (a, r) in enumerate(
                zip(one.accepted_per_position, one.rejected_per_position, strict=True)
            ):
                accepted[d] += a
                rejected[d] += r
        return cls(
            tokens=sum(one.completion_tokens - 1 for one in each),
            rounds=sum(one.rounds for one in each),
            drafted=sum(one.drafted_tokens for one in each),
            accepted=sum(one.accepted_tokens for one in each),
            acceptance_length=kept / full if full else 0.0,
            alpha=_share(sum(accepted), sum(rejected)),
            alpha_per_position=[_share(a, r) for a, r in zip(accepted, rejected, strict=True)],
            decode_seconds=sum(one.tpot_seconds * (one.completion_tokens - 1) for one in each),
            draft_seconds=sum(one.draft_seconds for one in each),
            verify_seconds=sum(one.verify_seconds for one in each),
            sample_seconds=sum(one.sample_seconds for one in each),
        )


def _share(accepted: int, rejected: int) -> float:
    decided = accepted + rejected
    return accepted / decided if decided else 0.0
