"""Structured output: a grammar decides which tokens may come next, along every path of a draft.

The grammar engine is llguidance, which compiles JSON schemas, regular expressions and Lark
grammars to token masks without torch.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError, SpecrtError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .text import Tokenizer

__all__ = ["Grammar", "GrammarState", "StructuredOutputs"]

_WHITESPACE = r"\n?[\x20\x09]{0,24}"
"""Between JSON's tokens: a new line and its indentation, and no end of it for a model to be
caught in. "x-guidance" in a schema says otherwise."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What a request's output has to look like; exactly one field is given."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a mapping. White space is at most a new line and 24 blanks."""
    regex: str | None = None
    """A regular expression that the whole output matches (Rust's syntax, no look-around)."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A grammar in llguidance's variant of Lark."""

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if self._has(name)]
        if len(given) != 1:
            raise InvalidArgumentError(
                "[structured_outputs] expected exactly one of json, regex, choice and grammar, "
                f"got {', '.join(given) or 'none'}"
            )
        if self.choice is not None and (
            isinstance(self.choice, (str, bytes))
            or not isinstance(self.choice, Sequence)
            or not self.choice
            or not all(isinstance(one, str) and one for one in self.choice)
        ):
            raise InvalidArgumentError(
                "[structured_outputs.choice] expected a list of texts of at least one character, "
                f"got {self.choice!r}"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidArgumentError(
                    f"[structured_outputs.{name}] expected a text, got {type(value).__name__}"
                )
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise InvalidArgumentError(
                "[structured_outputs.json] expected a JSON schema as text or mapping, "
                f"got {type(self.json).__name__}"
            )

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


class Grammar:
    """A tokenizer as llguidance sees it; compiles constraints for requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: ids beyond the tokenizer's are never allowed.

        Raises UnsupportedError where llguidance is missing or cannot use the tokenizer.
        """
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise UnsupportedError(
                "[structured_outputs] needs the package llguidance: pip install llguidance"
            ) from error
        if not eos_token_ids:
            raise UnsupportedError(
                "[structured_outputs] expected a model with an end token, got none"
            )
        self._llguidance = llguidance
        self.limits: Any = None  # llguidance.LLParserLimits; None: its own
        try:
            self.tokenizer = llguidance.hf.from_tokenizer(
                tokenizer.hf, n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except Exception as error:  # llguidance raises many kinds
            raise UnsupportedError(
                f"[structured_outputs] llguidance cannot use this tokenizer: {error}"
            ) from error

    def compile(self, wanted: StructuredOutputs) -> GrammarState:
        """The state at the start of an output. Raises InvalidArgumentError for a bad grammar."""
        matcher = self._llguidance.LLMatcher
        try:
            if wanted.json is not None:
                schema = wanted.json
                if not isinstance(schema, str):
                    schema = json_module.dumps(dict(schema))
                compiled = matcher.grammar_from_json_schema(
                    schema, defaults={"whitespace_pattern": _WHITESPACE}
                )
            elif wanted.regex is not None:
                compiled = matcher.grammar_from_regex(wanted.regex)
            elif wanted.choice is not None:
                options = " | ".join(json_module.dumps(one) for one in wanted.choice)
                compiled = matcher.grammar_from_lark(f"start: {options}")
            else:
                assert wanted.grammar is not None
                compiled = matcher.grammar_from_lark(wanted.grammar)

            def make() -> Any:
                return matcher(self.tokenizer, compiled, limits=self.limits)

            state = make()
            problem = state.get_error()
        except Exception as error:  # llguidance raises many kinds
            raise InvalidArgumentError(f"[structured_outputs] {error}") from error
        if problem:
            raise InvalidArgumentError(f"[structured_outputs] {problem}")
        return GrammarState(make, state)


class Lookahead:
    """One of llguidance's matchers behind the hooks that the core calls. Copies share a cache."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_bitmask(self, mask: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next, clear the others."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        # Afterwards: where the engine gives up, its mask leaves the end token alone.
        self._check()
        mask[:] = 0
        count = min(len(mask), len(bits))
        mask[:count] = bits[:count]

    def advance(self, token: int) -> None:
        """The token has been chosen. Raises InvalidArgumentError where the grammar forbids it."""
        if not self._matcher.consume_token(token):
            problem = _first_line(self._matcher)
            raise InvalidArgumentError(
                f"[structured_outputs] token {token} may not come here: {problem}"
            )

    def finished(self) -> bool:
        """Nothing but an end token may follow. Raises SpecrtError where the engine gave up."""
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        problem = _first_line(self._matcher)
        if problem:
            raise SpecrtError(f"[structured_outputs] the grammar engine gave up: {problem}")

    def accepts(self, tokens: list[int]) -> int:
        """How many leading tokens may follow; changes nothing."""
        return int(self._matcher.validate_tokens(tokens))

    def fork(self) -> Lookahead:
        """A copy in the same state."""
        return Lookahead(self._matcher.deep_copy())


def _first_line(matcher: Any) -> str:
    """Of the engine's error. What follows is its state, its work so far included."""
    lines: list[str] = matcher.get_error().splitlines()
    return lines[0] if lines else ""


class GrammarState(Lookahead):
    """Follows one output.

    A matcher gives up once its cache has grown too large, and copies of it fill that same cache. So
    that an output never ends earlier or later for what was drafted, the matcher that follows it is
    asked about nothing else: drafts are looked at with a second one, which has a cache of its own
    and is made when it is first needed.
    """

    def __init__(self, make: Callable[[], Any], matcher: Any = None) -> None:
        """`make` gives matchers that share nothing, each at the start of an output."""
        super().__init__(make() if matcher is None else matcher)
        self._make = make
        self._tokens: list[int] = []
        self._scout: Any = None

    def again(self) -> GrammarState:
        """Another output of the same grammar, at its start."""
        return GrammarState(self._make)

    def advance(self, token: int) -> None:
        super().advance(token)
        self._tokens.append(token)
        if self._scout is not None:
            self._scout.consume_token(token)

    def accepts(self, tokens: list[int]) -> int:
        """How many leading tokens may follow; none once the second matcher has given up."""
        return int(self._ahead().validate_tokens(tokens))

    def fork(self) -> Lookahead:
        """A copy to look ahead with: nothing that becomes of it shows here."""
        return Lookahead(self._ahead().deep_copy())

    def _ahead(self) -> Any:
        if self._scout is None:
            self._scout = self._make()
            self._scout.consume_tokens(self._tokens)
        return self._scout
