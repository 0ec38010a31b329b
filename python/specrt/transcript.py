"""Text out of the tokens that rounds bring forth."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .errors import SpecrtError
from .outputs import Increment, Logprob
from .stop_texts import StopTexts

if TYPE_CHECKING:
    from .sampling import SamplingParams
    from .text import Detokenizer, Tokenizer

    RawLogprob = tuple[float, int, list[tuple[int, float]]]
    RawLogprobs = list[RawLogprob]

__all__ = ["Transcript"]


class Transcript:
    """What one output says, as tokens and as text, in a part for each round.

    Rounds only add tokens: making text takes longer than all else that Python does in a round, so
    whoever reads it makes it, while the next pass runs. Only where a stop text may end the output
    is it made at once. What a tokenizer raises is kept as `error`, and no more text is made.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer | None, stop_ids: frozenset[int]
    ) -> None:
        """stop_ids: tokens that end the output, whose text is no part of it."""
        self._params = params
        self._tokenizer = tokenizer
        self._stop_ids = frozenset() if params.include_stop_str_in_output else stop_ids
        self._stops: StopTexts | None = None
        if params.stop_texts and tokenizer is not None:
            self._stops = StopTexts(params.stop_texts, kept=params.include_stop_str_in_output)
        self.parts: list[list[int]] = []
        """Tokens, round by round."""
        self._raw: list[RawLogprobs] = []
        """As many as parts where log-probabilities are asked for, else none."""
        self._raw_of_prompt: list[tuple[int, RawLogprob]] = []
        self._finish = ""
        """How it ended; set before readers are told of the last part."""
        self.error: SpecrtError | None = None
        self._making = threading.Lock()
        self._detokenizer: Detokenizer | None = None
        self._texts: list[str] = []
        """Of the parts that have been made, as are these:"""
        self._logprobs: list[list[dict[int, Logprob]]] = []
        self._logprobs_of_prompt: list[dict[int, Logprob]] = []
        self._tokens_made = 0
        self._told = 0
        """Parts that have left as increments."""

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part]

    @property
    def count(self) -> int:
        """Tokens so far."""
        return sum(map(len, self.parts))

    # For rounds.

    @property
    def looks_for_stops(self) -> bool:
        """Whether `find_stop` has to be asked behind every `add`."""
        return self._stops is not None

    def add(self, tokens: list[int], logprobs: RawLogprobs | None) -> None:
        """The tokens of a round."""
        if logprobs is not None:
            self._raw.append(logprobs)
        self.parts.append(tokens)

    def add_prompt(self, tokens: list[int], logprobs: RawLogprobs) -> None:
        """Log-probabilities of the prompt's tokens but the first."""
        self._raw_of_prompt = list(zip(tokens[1:], logprobs, strict=True))

    def find_stop(self, finish: str) -> int:
        """Make the part just added, which is the last one if `finish` says how it ends.

        Drops the tokens behind a stop text and says how many they are; -1 where there is none.
        Raises what the tokenizer raises.
        """
        with self._making:
            before = len(self.parts[-1])
            self._make_part(len(self.parts) - 1, finish)
            return -1 if self.stop_text is None else before - len(self.parts[-1])

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended it."""
        return None if self._stops is None else self._stops.found

    def end(self, finish: str, *, told: bool) -> str:
        """No round adds any more. told: whether readers have been told of every part.

        Makes nothing, and waits for nobody: it may interrupt who makes. Returns how it ended.
        """
        self._finish = finish if self.stop_text is None else "stop"
        if told:  # the end is news as well
            self.add([], None if self._params.logprobs is None else [])
        return self._finish

    # For readers.

    def increment(self, index: int) -> Increment | None:
        """The next part that has not been told; None where it cannot be made."""
        with self._making:
            place = self._told
            if not self._make(place + 1):
                return None
            increment = Increment(
                text=self._texts[place],
                token_ids=list(self.parts[place]),
                index=index,
                logprobs=None if self._params.logprobs is None else list(self._logprobs[place]),
                finish_reason=self._finish if place + 1 == len(self.parts) else "",
            )
            self._told = place + 1
            return increment

    def settle(self) -> None:
        """Make all there is: afterwards `error` says whether it can be made."""
        with self._making:
            self._make(len(self.parts))
            try:
                made = len(self._logprobs_of_prompt)
                for token, raw in self._raw_of_prompt[made:]:
                    self._logprobs_of_prompt.append(self._named(token, raw))
            except Exception as error:
                self.error = self.error or self._failure(error)

    @property
    def text(self) -> str:
        """All of it. Raises `error`, as the rest does."""
        self._settled()
        return "".join(self._texts)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """One for each token, if asked for."""
        self._settled()
        if self._params.logprobs is None:
            return None
        return [one for part in self._logprobs for one in part]

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One for each of the prompt's tokens, None for the first, if asked for."""
        self._settled()
        if self._params.prompt_logprobs is None:
            return None
        return [None, *self._logprobs_of_prompt]

    def _settled(self) -> None:
        self.settle()
        if self.error is not None:
            raise self.error

    # Making.

    def _make(self, count: int) -> bool:
        """The first `count` parts. False where they cannot be made."""
        while len(self._texts) < count and self.error is None:
            place = len(self._texts)
            try:
                self._make_part(place, self._finish if place + 1 == len(self.parts) else "")
            except Exception as error:
                self.error = self._failure(error)
            except BaseException:  # Ctrl-C, say: the next one to read makes the part anew
                self._detokenizer = None
                raise
        return self.error is None

    def _failure(self, error: Exception) -> SpecrtError:
        return SpecrtError(f"[output] {type(error).__name__}: {error}")

    def _make_part(self, place: int, finish: str) -> None:
        """finish: how the output ends with this part, "" where it goes on."""
        tokens = self.parts[place]
        text = ""
        if self._tokenizer is not None:
            detokenizer = self._open_detokenizer(place)
            before = self._tokens_made
            for at, token in enumerate(tokens):
                if finish == "stop" and at + 1 == len(tokens) and token in self._stop_ids:
                    break
                text += self._let_through(detokenizer.feed(token), before + at + 1)
                if self.stop_text is not None:
                    self.parts[place] = tokens[: at + 1]
                    break
            if finish and self.stop_text is None:
                # What is withdrawn in the middle of a character has not come to a stop there.
                armed = before + len(tokens) if finish != "abort" else -1
                text += self._let_through(detokenizer.flush(), armed)
                text += self._stops.flush() if self._stops is not None else ""
        if self._params.logprobs is not None:
            pairs = zip(self.parts[place], self._raw[place], strict=False)  # some may be dropped
            self._logprobs[place:] = [[self._named(token, raw) for token, raw in pairs]]
        self._tokens_made += len(self.parts[place])
        self._texts.append(text)

    def _open_detokenizer(self, place: int) -> Detokenizer:
        """As the parts before `place` leave it."""
        assert self._tokenizer is not None
        if self._detokenizer is None:
            detokenizer = self._tokenizer.detokenizer(
                skip_special_tokens=self._params.skip_special_tokens
            )
            for part in self.parts[:place]:
                for token in part:
                    detokenizer.feed(token)
            self._detokenizer = detokenizer
        return self._detokenizer

    def _let_through(self, text: str, tokens: int) -> str:
        """tokens: of the output up to here; -1: nothing stops here."""
        if self._stops is None:
            return text
        return self._stops.feed(text, armed=tokens >= max(0, self._params.min_tokens))

    def _named(
        self, token: int, raw: tuple[float, int, list[tuple[int, float]]]
    ) -> dict[int, Logprob]:
        """A token's log-probability and those of the likeliest, with their texts."""
        logprob, rank, top = raw
        named = {token: Logprob(logprob, rank, self._string(token))}
        for place, (other, value) in enumerate(top):
            if other not in named:
                named[other] = Logprob(value, place + 1, self._string(other))
        return named

    def _string(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.token_text(token)
