"""From what a request asks for to requests that the scheduler can run: read, checked, compiled."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .assembly import check_full_drafts, check_tree
from .errors import InvalidArgumentError, UnsupportedError
from .request import Request
from .sampling import SamplingParams
from .structured import Grammar

if TYPE_CHECKING:
    from ._core import Decoder, StaticTree
    from .planning import Sizes
    from .speculation import Defaults
    from .structured import GrammarState
    from .text import Tokenizer

__all__ = ["Intake"]


class Intake:
    """Makes an engine's requests; raises before any of them could run. For several threads."""

    def __init__(
        self,
        open_decoder: Callable[[], Decoder],
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        speculation: Defaults,
        trees: Sequence[StaticTree],
        sizes: Sizes,
    ) -> None:
        """open_decoder: gives the decoder, or raises where it is closed. trees: of the drafters."""
        self._open_decoder = open_decoder
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._speculation = speculation
        self._trees, self._sizes = trees, sizes
        self._grammar: Grammar | None = None
        self._preparing = threading.Lock()
        """Grammars are compiled one at a time."""

    def need_tokenizer(self, what: str) -> Tokenizer:
        """Raises InvalidArgumentError where the engine has none."""
        if self._tokenizer is None:
            raise InvalidArgumentError(
                f"[{what}] expected an engine with a tokenizer, got none: give token ids, or "
                "tokenizer= to Engine"
            )
        return self._tokenizer

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a text, or those that were given. Raises InvalidArgumentError."""
        if isinstance(prompt, str):
            return self.need_tokenizer("prompt").encode(prompt)
        if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
            raise InvalidArgumentError(
                f"[prompt] expected a text or a list of token ids, got {type(prompt).__name__}"
            )
        ids = []
        for one in prompt:
            try:
                token = operator.index(one)
            except TypeError:
                token = None
            if token is None or isinstance(one, bool):
                raise InvalidArgumentError(f"[prompt] expected integer token ids, got {one!r}")
            if not -(2**31) <= token < 2**31:
                raise InvalidArgumentError(f"[prompt] expected token ids, got {token}")
            ids.append(token)
        return ids

    def requests(
        self,
        prompts: list[list[int]],
        given: SamplingParams | Sequence[SamplingParams],
        arrived: float,
    ) -> list[list[Request]]:
        """Checked requests, none of them submitted yet: for each prompt its n samples."""
        if isinstance(given, SamplingParams):
            params = [given] * len(prompts)
        else:
            if not isinstance(given, Sequence):
                raise InvalidArgumentError(
                    f"[sampling_params] expected SamplingParams, got {type(given).__name__}"
                )
            params = list(given)
            if len(params) != len(prompts):
                raise InvalidArgumentError(
                    f"[sampling_params] expected one, or one for each of {len(prompts)} prompts, "
                    f"got {len(params)}"
                )
        self._open_decoder()
        return [
            self._samples(prompt, one, arrived) for prompt, one in zip(prompts, params, strict=True)
        ]

    def grammar(self) -> Grammar:
        """What compiles grammars for this vocabulary, made when first asked for."""
        if self._grammar is None:
            tokenizer = self.need_tokenizer("structured_outputs")
            self._grammar = Grammar(tokenizer, self._vocab_size, self._eos)
        return self._grammar

    def _samples(self, prompt: list[int], params: SamplingParams, arrived: float) -> list[Request]:
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(
                f"[sampling_params] expected SamplingParams, got {type(params).__name__}"
            )
        if params.stop_texts:
            self.need_tokenizer("stop")
        bad_words = self._bad_words(params.bad_words or ())
        speculation = self._check_speculation(params)
        if params.structured_outputs is not None:
            self._check_structured(params, speculation)
        if params.max_tokens is None:
            # One at least, so that a prompt that leaves no room for it is refused.
            room = self._open_decoder().most_tokens(len(prompt))
            params = replace(params, max_tokens=max(1, room))
        seeded = params.with_seed()
        core = [
            seeded.to_core(
                eos_token_ids=self._eos, sample_index=index, bad_words=bad_words, **speculation
            )
            for index in range(params.n)
        ]
        self._open_decoder().check(prompt, core[0])
        constraints = self._constraints(params)
        samples: list[Request] = []
        for index, core_params in enumerate(core):
            samples.append(
                Request(
                    prompt,
                    seeded,
                    core_params,
                    self._tokenizer,
                    stop_ids=frozenset(core_params.stop_token_ids),
                    index=index,
                    constraint=constraints[index],
                    after=samples[0] if samples else None,
                    lossless=not core_params.lossy,
                    arrived=arrived,
                )
            )
        return samples

    def _constraints(self, params: SamplingParams) -> Sequence[GrammarState | None]:
        """One for each sample."""
        if params.structured_outputs is None:
            return [None] * params.n
        with self._preparing:  # whoever has no grammar does not wait for this one
            start = self.grammar().compile(params.structured_outputs)
            return [start, *(start.again() for _ in range(1, params.n))]

    def _check_speculation(self, params: SamplingParams) -> dict[str, Any]:
        """How a request drafts, as arguments of `to_core`. Raises where it cannot be."""
        asked = params.speculation
        options = self._speculation.core_options(asked)
        if asked is not None and options["policy"] != "off":
            verification: str = options["verification"]
            for tree in self._trees:
                check_tree(tree, verification)
            if verification != "coupled":
                check_full_drafts(self._sizes, options["num_speculative_tokens"], verification)
        return options

    def _check_structured(self, params: SamplingParams, speculation: dict[str, Any]) -> None:
        """A grammar follows tokens that are certain, and the target's own."""
        verification = self._speculation.verification_of(params.speculation)
        if verification not in ("coupled", "rejection"):
            raise UnsupportedError(
                f"[structured_outputs] expected verification='coupled' or 'rejection', "
                f"got {verification!r}"
            )
        if speculation["policy"] == "adasd":
            raise UnsupportedError(
                "[structured_outputs] expected a policy other than 'adasd', got it"
            )
        if speculation["synthetic_acceptance_rates"]:
            raise UnsupportedError(
                "[structured_outputs] expected an engine without synthetic acceptance, got one"
            )

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of forbidden texts, at the start of a word and inside one."""
        found: list[list[int]] = []
        for word in words:
            tokenizer = self.need_tokenizer("bad_words")
            for text in (word, " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found
