"""`SamplingParams`: what a caller may set on a request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._core import CoreSamplingParams
from .errors import InvalidArgumentError
from .speculation import Speculation
from .structured import StructuredOutputs

__all__ = ["SamplingParams"]

_INT64 = 2**63 - 1
_MOST_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings are vLLM's.

    Logits pass, in this order, through repetition, frequency and presence penalties and
    `logit_bias`, then the masks (`allowed_token_ids`, `bad_words`, `min_tokens`,
    `structured_outputs`), then temperature, top_k, top_p, min_p, each on what the one before left,
    as in transformers. All of it holds along every path of a draft, with that path's history.
    """

    n: int = 1
    """Outputs for one prompt. They share the prompt's blocks and differ in their noise."""
    max_tokens: int | None = 256
    """Tokens to generate at most, >= 0; the context limit may end a text earlier. None: as many as
    context and KV cache have room for."""
    min_tokens: int = 0
    """No end token, stop token or stop text before so many tokens."""
    temperature: float = 0.0
    """Below 1e-5 is greedy: the most likely token, the lower id where two are equal."""
    top_p: float = 1.0
    """In (0, 1]: the most likely tokens whose probabilities reach this sum."""
    top_k: int = 0
    """The k most likely tokens; 0 or -1 is no limit."""
    min_p: float = 0.0
    """In [0, 1]: tokens at least this likely relative to the most likely one."""
    repetition_penalty: float = 1.0
    """> 0: positive logits of tokens in prompt or output are divided by it, negative multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Times a token's count in the output, subtracted from its logit."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; -inf forbids a token."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be chosen; an end token is only possible if it is among them."""
    bad_words: Sequence[str] | None = None
    """Texts that may not occur: the last token that would complete one's tokens is forbidden."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, regular expression, choice or grammar that the output follows."""
    seed: int | None = None
    """In [0, 2**64). None draws one, told in `RequestOutput.seed`."""
    stop: str | Sequence[str] | None = None
    """Texts that end the output."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Leave the stop text, or the stop token's text, at the end of the text."""
    speculation: Speculation | None = None
    """How this request drafts; None follows the engine."""
    posterior_threshold: float | None = None
    """With `typical` verification only, in (0, 1]: a drafted token this likely is accepted. None is
    0.09."""
    posterior_alpha: float | None = None
    """With `typical` verification only, > 0: and so is one likelier than this times exp(-entropy).
    None is 0.3."""
    logprobs: int | None = None
    """k >= 0: raw log-probabilities of the chosen token and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; such a request takes nothing from the prefix cache."""

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise _wrong(name, "an integer", value)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
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
        for name in ("max_tokens", "min_tokens", "top_k"):
            if (getattr(self, name) or 0) > _INT64:
                raise _wrong(name, "at most 2**63 - 1", getattr(self, name))
        if self.logprobs is not None and self.logprobs < 0:
            raise _wrong("logprobs", "None or at least 0", self.logprobs)
        if self.top_k < -1:
            raise _wrong("top_k", "at least -1", self.top_k)
        if not 1 <= self.n <= _MOST_SAMPLES:
            raise _wrong("n", f"from 1 to {_MOST_SAMPLES}", self.n)
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise _wrong("prompt_logprobs", "None or at least 0", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.max_tokens == 0:
            raise _wrong("prompt_logprobs", "max_tokens of at least 1 with it", self.max_tokens)
        if self.speculation is not None and not isinstance(self.speculation, Speculation):
            raise _wrong("speculation", "None or a Speculation", self.speculation)
        self._check_masks()
        self.to_core(eos_token_ids=(), verification=self._own_verification).check(2**31 - 1)

    @property
    def _own_verification(self) -> str:
        """One that every field given goes with."""
        typical = self.posterior_threshold is not None or self.posterior_alpha is not None
        return "typical" if typical else "coupled"

    def _check_masks(self) -> None:
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, Mapping)
            and all(_is_id(one) for one in bias)
            and all(_is_float(one) for one in bias.values())
        ):
            raise _wrong("logit_bias", "numbers by token id", bias)
        allowed = self.allowed_token_ids
        if allowed is not None and (
            isinstance(allowed, (str, bytes))
            or not isinstance(allowed, Sequence)
            or not allowed
            or not all(_is_id(one) for one in allowed)
        ):
            raise _wrong("allowed_token_ids", "None or a list of at least one token id", allowed)
        words = self.bad_words
        if words is not None and (
            isinstance(words, (str, bytes))
            or not isinstance(words, Sequence)
            or not all(isinstance(one, str) and one for one in words)
        ):
            raise _wrong("bad_words", "a list of texts of at least one character", words)
        if self.structured_outputs is not None and not isinstance(
            self.structured_outputs, StructuredOutputs
        ):
            raise _wrong("structured_outputs", "StructuredOutputs", self.structured_outputs)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def with_seed(self) -> SamplingParams:
        """Itself, or with a seed drawn where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """What a model's generation_config.json recommends, as transformers reads it.

        Temperature and filters count only with `do_sample`; values out of range are refused by
        name. Keys for other kinds of generation (beams, lengths of the whole text) are not read.
        """
        names = {"max_new_tokens": "max_tokens", "repetition_penalty": "repetition_penalty"}
        found: dict[str, Any] = {}
        if config.get("do_sample"):
            found["temperature"] = 1.0
            names |= {one: one for one in ("temperature", "top_k", "top_p", "min_p")}
        for theirs, ours in names.items():
            if config.get(theirs) is not None:
                found[ours] = config[theirs]
        return cls(**found)

    def to_core(
        self,
        *,
        eos_token_ids: Sequence[int],
        sample_index: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
        verification: str = "coupled",
        **speculation: Any,
    ) -> CoreSamplingParams:
        """The part that the core applies. Raises InvalidArgumentError, also where a field does not
        go with the verification.

        `bad_words` are the texts' token sequences; `sample_index` counts the n samples; the rest is
        what `Defaults.core_options` made of `speculation`.
        """
        for name in _TYPICAL:
            if getattr(self, name) is not None and verification != "typical":
                raise InvalidArgumentError(
                    f"[{name}] expected verification='typical' with it, got {verification!r}"
                )
        stops = list(self.stop_token_ids or ())
        if any(not -(2**31) <= one < 2**31 for one in stops):
            raise _wrong("stop_token_ids", "token ids", stops)
        if not self.ignore_eos:
            stops += [one for one in eos_token_ids if one not in stops]
        typical: dict[str, Any] = {
            name: float(value) for name in _TYPICAL if (value := getattr(self, name)) is not None
        }
        return CoreSamplingParams(
            max_tokens=_INT64 if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=[(int(id_), float(bias)) for id_, bias in (self.logit_bias or {}).items()],
            allowed_token_ids=list(self.allowed_token_ids or ()),
            bad_words=[list(one) for one in bad_words],
            seed=self.seed or 0,
            sample_index=sample_index,
            stop_token_ids=stops,
            verification=verification,
            **typical,
            logprobs=-1 if self.logprobs is None else min(self.logprobs, 2**31 - 1),
            # The prompt's are the same for every sample: the first one tells them.
            prompt_logprobs=(
                -1
                if self.prompt_logprobs is None or sample_index > 0
                else min(self.prompt_logprobs, 2**31 - 1)
            ),
            **speculation,
        )


_TYPICAL = ("posterior_threshold", "posterior_alpha")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", *_TYPICAL)
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    *_TYPICAL,
)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _INT64
    )


def _wrong(name: str, expected: str, got: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"[{name}] expected {expected}, got {got!r}")
