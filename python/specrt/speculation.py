"""`Speculation`: how one request drafts, and what an engine adds where the request says nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgumentError, UnsupportedError

__all__ = ["POLICIES", "VERIFICATIONS", "Defaults", "Speculation", "check_name", "synthetic_rates"]

POLICIES = ("goodput", "brake", "fixed", "ema_tiers", "adasd", "off")
VERIFICATIONS = ("coupled", "rejection", "block", "typical")


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How one request drafts; what is None follows the engine. Requests of one batch may differ.

    With `coupled` verification none of it changes the text, policy "adasd" aside.
    """

    drafter: bool = True
    """False: the request drafts nothing and costs what it would without a drafter."""
    num_speculative_tokens: int | None = None
    """Draft nodes a round, at most; 0 drafts nothing. Heads were made for the engine's number and
    take no more than that."""
    policy: str | None = None
    """"goodput", "brake", "fixed", "ema_tiers", "adasd" or "off", as `Engine` has them."""
    verification: str | None = None
    """"coupled", "rejection", "block" or "typical"."""
    target_tpot_seconds: float | None = None
    """For policy "goodput": mean time per token after the first that should not be exceeded."""
    target_ttft_seconds: float | None = None
    """For policy "goodput": time to the first token that should not be exceeded, from its
    submission."""

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, bool):
            raise _wrong("drafter", "True or False", self.drafter)
        tokens = self.num_speculative_tokens
        if tokens is not None and (
            isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 2**63
        ):
            raise _wrong("num_speculative_tokens", "None or an integer >= 0", tokens)
        if self.policy is not None:
            check_name("policy", self.policy, POLICIES)
        if self.verification is not None:
            check_name("verification", self.verification, VERIFICATIONS)
        check_targets(self.target_tpot_seconds, self.target_ttft_seconds, self.policy)
        drafts = self.drafter and self.policy != "off" and tokens != 0
        for name in _OF_DRAFTS:
            value = getattr(self, name)
            if not drafts and value not in (None, 0, "off"):
                raise _wrong(name, "None in a request that drafts nothing", value)


_OF_DRAFTS = ("num_speculative_tokens", "policy", "target_tpot_seconds", "target_ttft_seconds")


@dataclass(frozen=True)
class Defaults:
    """The engine's own settings."""

    policy: str
    verification: str
    draft_tokens: int
    most_draft_tokens: int | None
    """What a request may ask for, where that is bounded."""
    has_drafter: bool
    target_tpot_seconds: float | None = None
    target_ttft_seconds: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] = ()
    tells_laws: bool = False
    """Whether the drafter can serve policy "adasd"."""

    def verification_of(self, asked: Speculation | None) -> str:
        if asked is None or asked.verification is None:
            return self.verification
        return asked.verification

    def core_options(self, asked: Speculation | None) -> dict[str, Any]:
        """A request's arguments of CoreSamplingParams. Raises InvalidArgumentError."""
        asked = asked or Speculation()
        if not self.has_drafter:
            for name in ("target_tpot_seconds", "target_ttft_seconds"):
                if getattr(self, name) is not None:
                    raise _wrong(name, "a drafter to go with it", getattr(self, name))
            for name in _OF_DRAFTS:
                if getattr(asked, name) not in (None, 0, "off"):
                    raise _wrong(
                        name, "an engine with a drafter to go with it", getattr(asked, name)
                    )
        tokens = self.draft_tokens
        if asked.num_speculative_tokens is not None:
            tokens = asked.num_speculative_tokens
            if self.most_draft_tokens is not None and tokens > self.most_draft_tokens:
                raise _wrong(
                    "num_speculative_tokens",
                    f"at most {self.most_draft_tokens}, which the engine's drafter was made for",
                    tokens,
                )
        policy = asked.policy or self.policy
        if policy == "off" and asked.policy is None and asked.num_speculative_tokens:
            raise _wrong(
                "num_speculative_tokens", "a policy with it, the engine's is 'off'", tokens
            )
        if asked.policy not in (None, "off") and self.has_drafter and not tokens:
            raise _wrong("policy", "num_speculative_tokens above 0 with it, or 'off'", asked.policy)
        if not (self.has_drafter and asked.drafter and tokens):
            policy = "off"
        verification = self.verification_of(asked)
        if policy == "adasd" and verification != "coupled":
            raise _wrong("verification", "'coupled' with policy 'adasd'", verification)
        if policy == "adasd" and not self.tells_laws:
            raise UnsupportedError(
                "[policy] expected a draft model of the target's own vocabulary, or the target "
                "itself as drafter, with 'adasd', got another drafter"
            )
        rates = self.synthetic_acceptance_rates
        if rates and verification != "coupled":
            raise _wrong("verification", "'coupled' with synthetic acceptance", verification)
        if rates and policy == "adasd":
            raise _wrong("policy", "another one with synthetic acceptance", policy)
        targets = {}
        for name in ("target_tpot_seconds", "target_ttft_seconds"):
            own = getattr(asked, name)
            if own is not None and policy != "goodput":
                raise _wrong(name, "policy 'goodput' with it", own)
            value = own if own is not None else getattr(self, name)
            targets[name] = value or 0.0
        if policy == "off":
            tokens = 0
            # The engine's targets hold for who draws no drafts as well: others' slow it down.
            if self.policy == "goodput" and any(targets.values()):
                policy = "goodput"
        if policy != "goodput":
            targets = dict.fromkeys(targets, 0.0)
        return {
            "policy": policy,
            "verification": verification,
            "num_speculative_tokens": tokens,
            "synthetic_acceptance_rates": list(rates),
            **targets,
        }


def check_name(what: str, value: Any, known: Sequence[str]) -> None:
    """One of a few names."""
    if not isinstance(value, str) or value not in known:
        names = ", ".join(repr(one) for one in known[:-1])
        raise _wrong(what, f"{names} or {known[-1]!r}", value)


def check_targets(tpot: Any, ttft: Any, policy: str | None) -> None:
    """Times in seconds, for policy "goodput" (or None: not known yet)."""
    for name, value in (("target_tpot_seconds", tpot), ("target_ttft_seconds", ttft)):
        if value is None:
            continue
        fine = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not fine or not math.isfinite(value) or value <= 0:
            raise _wrong(name, "None or a finite number > 0", value)
        if policy not in (None, "goodput"):
            raise _wrong(name, f"policy 'goodput' with it, not {policy!r}", value)


def synthetic_rates(rate: Any, rates: Any, has_drafter: bool) -> tuple[float, ...]:
    """`Engine`'s synthetic_acceptance_rate and synthetic_acceptance_rates as one; () for none."""
    if rate is None and rates is None:
        return ()
    name = "synthetic_acceptance_rate" if rates is None else "synthetic_acceptance_rates"
    if rate is not None and rates is not None:
        raise _wrong(name, "None beside synthetic_acceptance_rate", rates)
    if not has_drafter:
        raise _wrong(name, "a drafter to go with it", rate if rates is None else rates)
    given = [rate] if rates is None else rates
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not given:
        raise _wrong(name, "a list of at least one number", rates)
    for one in given:
        fine = isinstance(one, (int, float)) and not isinstance(one, bool)
        if not fine or not 0.0 <= one <= 1.0:
            raise _wrong(
                name, "numbers in [0, 1]" if rates is not None else "a number in [0, 1]", one
            )
    return tuple(float(one) for one in given)


def _wrong(name: str, expected: str, got: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"[{name}] expected {expected}, got {got!r}")
