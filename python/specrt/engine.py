"""`Engine`: a target, perhaps a drafter, and requests that run together."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from . import _core
from .assembly import POLICIES, check_full_drafts, check_options, draft_tokens_of
from .drafters import is_head, resolve
from .errors import InvalidArgumentError, SpecrtError, UnsupportedError
from .loaded import open_target
from .parts import Asked, Frame, OwnDrafter, Parts, open_parts
from .planning import (
    Features,
    MemoryPlan,
    cache_tokens,
    check_positive,
    check_room,
    plan_memory,
    plan_sizes,
)
from .prompts import check_conversation, is_conversation, is_prompt
from .request import Request, request_output
from .sampling import SamplingParams
from .self_test import self_test as try_drafts
from .structured import Grammar

if TYPE_CHECKING:
    from .outputs import Increment, RequestOutput
    from .text import Tokenizer

__all__ = ["Engine"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class Engine:
    """Generates with a target model, sped up by a drafter whose guesses the target checks.

        with specrt.Engine("HuggingFaceTB/SmolLM2-135M-Instruct", drafter="ngram") as engine:
            print(engine.generate("The capital of France is").text)

    With `verification="coupled"`, text and token ids do not depend on the drafter, on
    `num_speculative_tokens`, on what else runs or on `threads`. Safe to use from several threads:
    their requests share rounds.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        pin_threads: bool = False,
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
        max_batch_size: int = 32,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        num_speculative_tokens: int | None = None,
        verification: str = "coupled",
        policy: str = "brake",
        cpu_isa: str = "auto",
        enable_prefix_caching: bool = True,
        check_invariants: bool = False,
        self_test: bool = True,
    ) -> None:
        """Load a target and its drafter.

        target: a folder, a hub id, a .gguf file, a file from `save`, or a transformers model.
        drafter: None, "ngram", "suffix", "self", "mtp", a smaller model given like the target, a
            folder or hub id of an EAGLE or Medusa head, or an object of `specrt.drafters`.
        tokenizer: a Hugging Face tokenizer, or where to load one; None takes the target's own.
        device: "auto" or "cpu".
        dtype: of weights: "float32", "bfloat16", "int8" or "int4" (the weights alone), or "w8a8"
            (int8 activations too). "auto" is float32 for float32 checkpoints, else bfloat16.
        threads: None takes the cores that this process may use.
        pin_threads: tie each thread but the caller's to a core.
        max_model_len: tokens of prompt and output together; None takes the model's own limit.
        kv_cache_bytes: target's and drafter's KV cache together; None takes what every sequence
            at full length needs, at most a quarter of the available memory. More than that keeps
            more of finished requests, and is not taken without prefix caching.
        max_batch_size: requests that run at once; more wait.
        max_num_batched_tokens: tokens in one forward pass, prefill and drafts together.
        block_size: tokens in a block of the paged KV cache.
        kv_cache_dtype: how target and draft model keep keys and values: "auto" (float32 for a
            float32 model, else bfloat16), "float32", "bfloat16" or "int8" (with a scale for each
            token and head). The text may differ from one to another.
        num_speculative_tokens: draft tokens a round; None takes the drafter's default, 0 drafts
            nothing.
        verification: "coupled" (the target's own choice decides, so that the output does not
            depend on the draft), or "rejection" or "block", which keep the target's law, accept a
            little more of a sampled draft, and repeat only for the same drafter and settings. Or
            "typical", which is lossy: it accepts what the target finds likely enough (Medusa,
            arXiv 2401.10774); outputs then say `lossless=False`.
        policy: "brake" (a request whose drafts fail drafts fewer tokens, then none but for a probe
            now and then) or "fixed" (always `num_speculative_tokens`).
        cpu_isa: "auto", or the instruction-set level to run: "amx", "avx512", "avx2", "scalar".
        enable_prefix_caching: keep the KV blocks of finished requests for prompts that begin
            alike, for as long as running requests leave room.
        check_invariants: for tests: check the KV caches' bookkeeping after every round, and keep
            KV memory that holds nothing filled with NaN, so that reading it would show.
        self_test: answer a short prompt when the engine is made, and warn where the drafter is a
            trained head of which not one draft is accepted.

        Raises InvalidArgumentError, UnsupportedError, LoadError or CapacityError before any weight
        is read, wherever headers tell; LoadError for damaged data.
        """
        isa = check_options(
            device=device,
            verification=verification,
            policy=policy,
            cpu_isa=cpu_isa,
            enable_prefix_caching=enable_prefix_caching,
            check_invariants=check_invariants,
            pin_threads=pin_threads,
            self_test=self_test,
        )
        check_positive(threads=threads, max_model_len=max_model_len)
        spec = resolve(drafter)
        draft_tokens = draft_tokens_of(spec, num_speculative_tokens)

        self._lock = threading.RLock()
        self._closed = False
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._stepping = False
        self._results: deque[tuple[Any, ...]] = deque()
        """Of the last round, not delivered yet."""
        self._left: list[Request] = []
        """Requests whose caller has gone while a round was under way."""
        opened = open_target(target, tokenizer=tokenizer, dtype=dtype, max_model_len=max_model_len)
        part: Parts | None = None
        try:
            if spec is not None:
                asked = Asked(num_speculative_tokens, max_model_len, max_batch_size, verification)
                part = open_parts(spec, opened, asked)
                draft_tokens = part.draft_tokens
            shape = part.shape if part is not None else None
            defaults = SamplingParams.from_generation_config(opened.generation)
            sizes = plan_sizes(
                opened.shape,
                shape,
                max_model_len=max_model_len,
                kv_cache_bytes=kv_cache_bytes,
                max_batch_size=max_batch_size,
                max_num_batched_tokens=max_num_batched_tokens,
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                enable_prefix_caching=enable_prefix_caching,
                features=part.features if part is not None else Features(),
            )
            if verification != "coupled" and spec is not None:
                check_full_drafts(sizes, draft_tokens, verification)
            fixed = part.fixed if part is not None else None
            check_room(plan_memory(opened.shape, shape, sizes, fixed))
            if part is not None:
                part.load()
            self._model = opened.load()
        finally:
            opened.close()
            if part is not None:
                part.close()

        team = _core.ThreadTeam(threads or 0, pin_threads)
        self._decoder: _core.Decoder | None = _core.Decoder(
            self._model,
            **sizes.target_options(),
            team=team,
            cpu_isa=isa,
            check_invariants=check_invariants,
        )
        frame = Frame(self._model, opened, sizes, team, isa, check_invariants)
        self._drafter: OwnDrafter | None = (
            part.make(frame, self._decoder.memory.weights) if part is not None else None
        )
        self.verification: str = verification
        self.policy: str = policy
        self._plan = POLICIES[policy]
        self._grammar: Grammar | None = None
        self._vocab_size = opened.shape.config.vocab_size
        self.num_speculative_tokens: int = draft_tokens
        self._tokenizer = opened.tokenizer
        self._eos = opened.eos_token_ids
        self.default_sampling_params: SamplingParams = defaults
        """What requests without sampling_params get: the model's generation_config.json."""
        self._kv_cache_tokens = cache_tokens(opened.shape, sizes)
        self.name: str = opened.name
        self.dtype: str = opened.shape.dtype
        self.kv_cache_dtype: str = _core.resolve_kv_cache_dtype(kv_cache_dtype, self.dtype)
        self.max_model_len: int = sizes.max_model_len
        self.cpu_isa: str = isa
        self.threads: int = team.size
        if self_test and self._drafter is not None and is_head(spec) and self._tokenizer:
            try_drafts(self._decoder, self._drafter.for_request(), self._tokenizer, repr(drafter))

    # What it is.

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the target came without one."""
        return self._tokenizer

    @property
    def memory(self) -> MemoryPlan:
        """Bytes held, by owner and purpose."""
        with self._lock:
            decoder = self._open_decoder()
            own = decoder.memory
            others = self._drafter.memory if self._drafter is not None else []
            return MemoryPlan(
                target_weights=own.weights,
                target_kv_cache=own.kv_cache,
                target_workspace=own.workspace,
                drafter_weights=sum(one.weights for one in others),
                drafter_kv_cache=sum(one.kv_cache for one in others),
                drafter_workspace=sum(one.workspace for one in others),
                drafter_index=sum(one.other for one in others),
                kv_cache_tokens=self._kv_cache_tokens,
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the packed target for `Engine(path)` and for C++'s `specrt::Model::map`.

        The name ends in .specrt. It holds config and weights, not the tokenizer. Raises LoadError.
        """
        name = os.fspath(path)
        if not name.endswith(".specrt"):
            raise InvalidArgumentError(f"[path] expected a name ending in .specrt, got {name!r}")
        with self._lock:
            self._open_decoder()
            model = self._model
        model.save(name)

    # What it does.

    # A text is itself a sequence of texts to a type checker; the first overload is meant for it.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or several at once.

        A prompt is a text or a list of token ids; `sampling_params` is one for all, a list with
        one each, or None for `default_sampling_params`. Raises InvalidArgumentError or
        CapacityError before anything runs where one of them cannot. An error of one request while
        running is raised after the others are done, with their outputs (None for the failed) in
        the exception's `outputs`.
        """
        single = is_prompt(prompts)
        batch: list[Any] = [prompts] if single else list(prompts)
        outputs = self._run(self._requests([self._encode(one) for one in batch], sampling_params))
        return outputs[0] if single else outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> Any:
        """Answer a conversation (or a list of them) through the model's chat template.

        `messages` are {"role": ..., "content": ...}; `template_options` go to the template. Gives
        and raises what `generate` does.
        """
        single = is_conversation(messages)
        conversations: list[Any] = [messages] if single else list(messages)
        tokenizer = self._need_tokenizer("chat")
        for one in conversations:
            check_conversation(one)
        prompts = [tokenizer.apply_chat_template(one, **template_options) for one in conversations]
        outputs = self._run(self._requests(prompts, sampling_params))
        return outputs[0] if single else outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[Increment, None, RequestOutput]:
        """Continue one prompt, yielding text and tokens as they become certain.

        The increments' texts and tokens, joined, are those of `generate`. The generator's return
        value is the RequestOutput; closing it early cancels the request.
        """
        return self._stream(self._requests([self._encode(prompt)], sampling_params))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Generator[Increment, None, RequestOutput]:
        """`chat` for one conversation, yielding as `stream` does."""
        tokenizer = self._need_tokenizer("chat")
        check_conversation(messages)
        prompt = tokenizer.apply_chat_template(messages, **template_options)
        return self._stream(self._requests([prompt], sampling_params))

    def close(self) -> None:
        """Free everything. Running requests end with an error. May be called twice."""
        with self._lock:
            if self._closed:
                return
            if self._stepping:
                raise InvalidArgumentError(
                    "[engine] expected no close() from inside a drafter or grammar, got one"
                )
            self._closed = True
            for request in [*self._waiting, *self._running.values()]:
                request.error = SpecrtError("[engine] closed while the request was running")
            self._waiting.clear()
            self._running.clear()
            self._results.clear()
            self._decoder = None
            self._drafter = None
            del self._model

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Requests.

    def _open_decoder(self) -> _core.Decoder:
        if self._decoder is None:
            raise InvalidArgumentError("[engine] expected an open engine, got a closed one")
        return self._decoder

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidArgumentError(
                f"[{what}] expected an engine with a tokenizer, got none: give token ids, or "
                "tokenizer= to Engine"
            )
        return self._tokenizer

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer("prompt").encode(prompt)
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

    def _requests(
        self,
        prompts: list[list[int]],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[list[Request]]:
        """Checked requests, none of them submitted yet: for each prompt its n samples."""
        if given is None or isinstance(given, SamplingParams):
            params = [given or self.default_sampling_params] * len(prompts)
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
        with self._lock:
            self._open_decoder()
            return [self._samples(prompt, one) for prompt, one in zip(prompts, params, strict=True)]

    def _samples(self, prompt: list[int], params: SamplingParams) -> list[Request]:
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(
                f"[sampling_params] expected SamplingParams, got {type(params).__name__}"
            )
        if params.stop_texts:
            self._need_tokenizer("stop")
        bad_words = self._bad_words(params.bad_words or ())
        start = None
        if params.structured_outputs is not None:
            if self.verification not in ("coupled", "rejection"):
                raise UnsupportedError(
                    f"[structured_outputs] expected verification='coupled' or 'rejection', "
                    f"got {self.verification!r}"
                )
            start = self._need_grammar().compile(params.structured_outputs)
        seeded = params.with_seed()
        samples: list[Request] = []
        for index in range(params.n):
            core_params = seeded.to_core(
                eos_token_ids=self._eos,
                sample_index=index,
                bad_words=bad_words,
                verification=self.verification,
            )
            if index == 0:
                self._open_decoder().check(prompt, core_params)
            samples.append(
                Request(
                    prompt,
                    seeded,
                    core_params,
                    self._tokenizer,
                    stop_ids=frozenset(core_params.stop_token_ids),
                    index=index,
                    constraint=start if start is None or index == 0 else start.again(),
                    after=samples[0] if samples else None,
                    lossless=self.verification != "typical",
                )
            )
        return samples

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of forbidden texts, at the start of a word and inside one."""
        found: list[list[int]] = []
        for word in words:
            tokenizer = self._need_tokenizer("bad_words")
            for text in (word, " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _need_grammar(self) -> Grammar:
        if self._grammar is None:
            tokenizer = self._need_tokenizer("structured_outputs")
            self._grammar = Grammar(tokenizer, self._vocab_size, self._eos)
        return self._grammar

    def _run(self, groups: list[list[Request]]) -> list[RequestOutput]:
        requests = [one for group in groups for one in group]
        self._submit(requests)
        try:
            while not all(request.done for request in requests):
                self._step()
        finally:
            self._withdraw(requests)
        errors = [request.error for request in requests if request.error is not None]
        if errors:
            outputs = [
                None if any(one.error is not None for one in group) else request_output(group)
                for group in groups
            ]
            errors[0].outputs = outputs  # type: ignore[attr-defined]
            raise errors[0]
        return [request_output(group) for group in groups]

    def _stream(self, groups: list[list[Request]]) -> Generator[Increment, None, RequestOutput]:
        # Checked when stream() is called; submitted at the first next().
        if len(groups[0]) != 1:
            raise InvalidArgumentError(f"[n] expected 1 for a stream, got {len(groups[0])}")
        return self._increments(groups[0][0])

    def _increments(self, request: Request) -> Generator[Increment, None, RequestOutput]:
        self._submit([request])
        try:
            while True:
                # Together and under the lock, since any thread's round may feed the request.
                with self._lock:
                    done = request.done
                    increment = request.increment()
                if increment is not None:
                    yield increment
                if done:
                    return request_output([request])
                self._step()
        finally:
            self._withdraw([request])

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            self._open_decoder()
            self._waiting.extend(requests)

    def _withdraw(self, requests: list[Request]) -> None:
        """Cancel what is not done: the caller has left."""
        with self._lock:
            self._left.extend(one for one in requests if not one.done)
            # Inside a round (a drafter, or the collector closing a stream) it waits for its end.
            if not self._stepping:
                self._cancel_left()

    def _cancel_left(self) -> None:
        while self._left:
            request = self._left.pop()
            if request.done:
                continue
            if request.id is not None and self._running.pop(request.id, None) is not None:
                if self._decoder is not None:
                    self._decoder.cancel(request.id)
            elif request in self._waiting:
                self._waiting.remove(request)

    def _step(self) -> None:
        """One round for everything that runs, whoever asked for it."""
        with self._lock:
            if self._stepping:
                raise InvalidArgumentError(
                    "[engine] expected no call from inside a drafter or grammar, got one"
                )
            if self._decoder is None:
                return
            self._stepping = True
            try:
                if not self._results:
                    self._admit(self._decoder)
                    plan = self._plan(self._decoder, self.num_speculative_tokens)
                    try:
                        self._results.extend(self._decoder.round(plan))
                    except BaseException as error:
                        self._fail_all(self._decoder, error)
                        raise
                # What an interrupt leaves here is delivered by the next step.
                while self._results:
                    self._deliver(self._decoder, *self._results.popleft())
            finally:
                self._stepping = False
                self._cancel_left()

    def _fail_all(self, decoder: _core.Decoder, error: BaseException) -> None:
        """A round whose results were lost, to Ctrl-C say: whoever was in it would have a gap."""
        for sequence, request in self._running.items():
            request.error = SpecrtError(f"[engine] a round was lost: {type(error).__name__}")
            with contextlib.suppress(InvalidArgumentError):  # it may have ended in that round
                decoder.cancel(sequence)
        self._running.clear()

    def _admit(self, decoder: _core.Decoder) -> None:
        held: list[Request] = []
        entering: Request | None = None
        try:
            while self._waiting:
                entering = self._waiting.popleft()
                if not entering.may_start:
                    held.append(entering)  # it waits for its own first sample, others need not
                    entering = None
                    continue
                if not decoder.can_add(len(entering.prompt), entering.params.max_tokens):
                    break
                constraint = None
                if entering.constraint is not None:
                    constraint = _core.make_python_constraint(entering.constraint)
                try:
                    drafter = None
                    if self._drafter is not None and self.num_speculative_tokens > 0:
                        drafter = self._drafter.for_request()
                    entering.id = decoder.add(
                        entering.prompt, entering.core_params, drafter, constraint
                    )
                    self._running[entering.id] = entering
                except SpecrtError as error:
                    entering.error = error
                entering = None
        finally:
            # Whoever did not get in waits on, also where Ctrl-C came in between.
            if entering is not None:
                self._waiting.appendleft(entering)
            self._waiting.extendleft(reversed(held))

    def _deliver(
        self,
        decoder: _core.Decoder,
        sequence: int,
        tokens: list[int],
        logprobs: Any,
        prompt_logprobs: Any,
        finish: str,
        counters: _core.SequenceCounters | None,
        error: str,
    ) -> None:
        request = self._running.get(sequence)
        if request is None:
            return
        if finish:
            del self._running[sequence]
        if error:
            request.fail(error)
            return
        try:
            if prompt_logprobs is not None:
                request.tell_prompt(prompt_logprobs)
            cut = request.feed(tokens, logprobs, finish)
            if cut >= 0:
                # A stop text ends it before the core would have, or in the round in which it did.
                counters = decoder.stop(sequence, cut)
                self._running.pop(sequence, None)
                finish = "stop"
            if finish:
                request.end(finish, counters)
        except Exception as caught:  # a tokenizer's, say: it ends this request and no other
            request.error = SpecrtError(f"[output] {type(caught).__name__}: {caught}")
            if self._running.pop(sequence, None) is not None:
                decoder.cancel(sequence)
