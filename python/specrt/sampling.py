"""`SamplingParams`: what a caller may set on a request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ._core import CoreSamplingParams
from .errors import InvalidArgumentError, UnsupportedError

__all__ = ["SamplingParams"]

_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings are vLLM's.

    Filters apply in the order temperature, top_k, top_p, min_p, each on what the one before left,
    as in transformers. Fields marked "not yet" exist so that they can be refused by name: any value
    but the default raises UnsupportedError.
    """

    max_tokens: int = 256
    """Tokens to generate at most, >= 0; the context limit may end a text earlier."""
    min_tokens: int = 0
    """Not yet."""
    temperature: float = 0.0
    """Below 1e-5 is greedy: the most likely token, the lower id where two are equal."""
    top_p: float = 1.0
    """In (0, 1]: the most likely tokens whose probabilities reach this sum."""
    top_k: int = 0
    """The k most likely tokens; 0 or -1 is no limit."""
    min_p: float = 0.0
    """In [0, 1]: tokens at least this likely relative to the most likely one."""
    seed: int | None = None
    """In [0, 2**64). None draws one, told in `RequestOutput.seed`."""
    stop: str | Sequence[str] | None = None
    """Texts that end the output."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Leave the stop text, or the stop token's text, at the end of the text."""
    logprobs: int | None = None
    """k >= 0: raw log-probabilities of the chosen token and of the k most likely ones."""
    n: int = 1
    """Not yet."""
    presence_penalty: float = 0.0
    """Not yet."""
    frequency_penalty: float = 0.0
    """Not yet."""
    repetition_penalty: float = 1.0
    """Not yet."""
    logit_bias: Mapping[int, float] | None = None
    """Not yet."""
    allowed_token_ids: Sequence[int] | None = None
    """Not yet."""
    bad_words: Sequence[str] | None = None
    """Not yet."""
    prompt_logprobs: int | None = None
    """Not yet."""

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise _wrong(name, "an integer", value)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _wrong(name, "a number", value)
            if isinstance(value, int) and abs(value) > _INT64:
                raise _wrong(name, "a smaller number", value)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "True or False", getattr(self, name))
        if self.stop is not None and not isinstance(self.stop, Sequence):
            raise _wrong("stop", "a text or a list of texts", self.stop)
        for text in self.stop_texts:
            if not isinstance(text, str) or not text:
                raise _wrong("stop", "texts of at least one character", text)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if (
            isinstance(ids, (str, bytes))
            or not isinstance(ids, Sequence)
            or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
        ):
            raise _wrong("stop_token_ids", "a list of integers", self.stop_token_ids)
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise _wrong("seed", "an integer in [0, 2**64)", self.seed)
        for name in ("max_tokens", "top_k"):
            if getattr(self, name) > _INT64:
                raise _wrong(name, "at most 2**63 - 1", getattr(self, name))
        if self.logprobs is not None and self.logprobs < 0:
            raise _wrong("logprobs", "None or at least 0", self.logprobs)
        if self.top_k < -1:
            raise _wrong("top_k", "at least -1", self.top_k)
        for field in fields(self):
            if field.name in _NOT_YET and getattr(self, field.name) != field.default:
                raise UnsupportedError(
                    f"[{field.name}] is not available yet: expected {field.default!r}, "
                    f"got {getattr(self, field.name)!r}"
                )
        self.to_core(eos_token_ids=()).check(2**31 - 1)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def with_seed(self) -> SamplingParams:
        """Itself, or with a seed drawn where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def to_core(self, *, eos_token_ids: Sequence[int]) -> CoreSamplingParams:
        """The part that the core applies. Raises InvalidArgumentError."""
        stops = list(self.stop_token_ids or ())
        if any(not -(2**31) <= one < 2**31 for one in stops):
            raise _wrong("stop_token_ids", "token ids", stops)
        if not self.ignore_eos:
            stops += [one for one in eos_token_ids if one not in stops]
        return CoreSamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed or 0,
            stop_token_ids=stops,
            logprobs=-1 if self.logprobs is None else min(self.logprobs, 2**31 - 1),
        )


_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "n", *_OPTIONAL)
_NOT_YET = (
    "min_tokens",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


def _wrong(name: str, expected: str, got: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"[{name}] expected {expected}, got {got!r}")
