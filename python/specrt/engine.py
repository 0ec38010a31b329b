"""`Engine`: a target, perhaps a drafter, and requests that run together."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from . import _core
from .assembly import check_full_drafts, check_options, draft_tokens_of
from .costs import cache_folder, cost_model_of
from .delivery import Delivery
from .drafters import is_head, resolve
from .engine_metrics import EngineMetrics, MetricsObserver
from .errors import CapacityError, InvalidArgumentError
from .handle import RequestHandle
from .intake import Intake
from .loaded import open_target
from .observer import Both
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
from .scheduler import Scheduler
from .self_test import self_test as try_drafts
from .speculation import Defaults, check_targets, synthetic_rates
from .trace import TraceWriter, brief

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
        max_queued_requests: int | None = None,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        num_speculative_tokens: int | None = None,
        verification: str = "coupled",
        policy: str = "goodput",
        target_tpot_seconds: float | None = None,
        target_ttft_seconds: float | None = None,
        synthetic_acceptance_rate: float | None = None,
        synthetic_acceptance_rates: Sequence[float] | None = None,
        cost_cache: bool | str | os.PathLike[str] | None = None,
        cpu_isa: str = "auto",
        enable_prefix_caching: bool = True,
        preemption: bool = True,
        check_invariants: bool = False,
        self_test: bool = True,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """Load a target and its drafter.

        target: a folder, a hub id, a .gguf file, a file from `save`, or a transformers model.
        drafter: None, "ngram", "suffix", "self", "mtp", a smaller model given like the target, a
            folder or hub id of an EAGLE or Medusa head, or an object of `specrt.drafters`.
        tokenizer: a Hugging Face tokenizer, or where to load one; None takes the target's own.
        device: "auto" (the CPU), "cpu", "cuda" or "cuda:N": an NVIDIA GPU, in a build with CUDA. It
            takes dtypes "bfloat16", "float16", "int8" and "int4", a KV cache as "auto" has it, and
            every drafter; what it does not take is refused by name. No GPU has run it so far: see
            README.
        dtype: of weights: "float32", "bfloat16", "float16" (with device "cuda"), "int8" or "int4"
            (the weights alone), or "w8a8" (int8 activations too). "auto" is float32 for float32
            checkpoints, else bfloat16.
        threads: None takes the cores that this process may use.
        pin_threads: tie each thread but the caller's to a core.
        max_model_len: tokens of prompt and output together; None takes the model's own limit.
        kv_cache_bytes: target's and drafter's KV cache together; None takes what every sequence
            at full length needs, at most a quarter of the available memory. More than that keeps
            more of finished requests, and is not taken without prefix caching.
        max_batch_size: requests that run at once; more wait, the smallest `priority` first.
        max_num_batched_tokens: tokens in one forward pass, prefill and drafts together.
        max_queued_requests: requests that may wait beside those that find a place; more raise
            QueueFullError. None: any number.
        block_size: tokens in a block of the paged KV cache.
        kv_cache_dtype: how target and draft model keep keys and values: "auto" (a float32 or
            float16 model's own, else bfloat16), "float32", "bfloat16", "float16" (with device
            "cuda") or "int8" (with a scale for each token and head). The text may differ from one
            to another.
        num_speculative_tokens: draft tokens a round; None takes the drafter's default, 0 drafts
            nothing.
        verification: "coupled" (the target's own choice decides, so that the output does not
            depend on the draft), or "rejection" or "block", which keep the target's law, accept a
            little more of a sampled draft, and repeat only for the same drafter and settings. Or
            "typical", which is lossy: it accepts what the target finds likely enough (Medusa,
            arXiv 2401.10774); outputs then say `lossless=False`.
        policy: how many tokens each request drafts in a round. "goodput" (one choice over all
            requests, of what yields the most tokens a second by costs measured on this machine;
            with verifications whose texts depend on drafts, "brake"), "brake" (a request whose
            drafts fail drafts fewer, then none but for a probe now and then; it looks at no clock,
            so that the drafts repeat as the text does), "fixed" (always
            `num_speculative_tokens`), "ema_tiers" (SGLang's adaptive steps: tiers by batch size,
            moved by a mean of accepted drafts), "off" (none; requests may ask for another policy),
            or "adasd", which is lossy (AdaSD, arXiv 2512.11280): it ends a draft behind a token of
            high entropy, and accepts a token where the laws of draft model and target are near;
            outputs then say `lossless=False`. It takes a draft model of the target's vocabulary,
            or the target itself as drafter.
        target_tpot_seconds: with policy "goodput": mean time per token after the first that no
            request should exceed. Prompts wait for it, a second at most or half their own target.
        target_ttft_seconds: with policy "goodput": time to the first token that no request should
            exceed, from its submission.
        synthetic_acceptance_rate: in [0, 1]: accept each drafted token that is reached with this
            probability, whatever the target says, to see what drafts of a given quality gain. The
            text is not the target's, and outputs say `lossless=False`.
        synthetic_acceptance_rates: the same by position, each of those that reached it; the last
            one holds for what is deeper.
        cost_cache: for policy "goodput", whose costs are measured at the start, in 2 seconds or 20
            passes: a folder that keeps them by machine and model, or True for the user's cache.

        Of these, `num_speculative_tokens`, `verification`, `policy` and the targets hold for
        requests whose `SamplingParams.speculation` says nothing else.
        cpu_isa: "auto", or the instruction-set level to run: "amx", "avx512", "avx2", "scalar".
        enable_prefix_caching: keep the KV blocks of finished requests for prompts that begin
            alike, for as long as running requests leave room.
        preemption: let requests in on room for their prompt and a little. Where the KV cache then
            runs full, the last to come of the largest `priority` gives its room back and is
            computed again later, with the same output. False sets room aside for the longest
            output, so fewer run at once.
        check_invariants: for tests: check the KV caches' bookkeeping after every round, and keep
            KV memory that holds nothing filled with NaN, so that reading it would show.
        self_test: answer a short prompt when the engine is made, and warn where the drafter is a
            trained head of which not one draft is accepted.
        trace: a file to write every round to, for `specrt trace` (`specrt.trace` has its format);
            what is there already is replaced.

        Raises InvalidArgumentError, UnsupportedError, LoadError or CapacityError before any weight
        is read, wherever headers tell; LoadError for damaged data.
        """
        on, isa = check_options(
            device=device,
            verification=verification,
            policy=policy,
            cpu_isa=cpu_isa,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            check_invariants=check_invariants,
            pin_threads=pin_threads,
            self_test=self_test,
        )
        check_positive(
            threads=threads,
            max_model_len=max_model_len,
            max_queued_requests=max_queued_requests,
        )
        spec = resolve(drafter)
        draft_tokens = draft_tokens_of(spec, num_speculative_tokens)
        if spec is not None and draft_tokens == 0:
            told = "drafts nothing unless a request asks: num_speculative_tokens is 0"
            warnings.warn(f"drafter {brief(spec)} {told}", stacklevel=2)
        rates = synthetic_rates(
            synthetic_acceptance_rate, synthetic_acceptance_rates, spec is not None
        )
        check_targets(target_tpot_seconds, target_ttft_seconds, policy)
        costs = cache_folder(cost_cache)
        if costs is not None and (spec is None or policy != "goodput"):
            raise InvalidArgumentError(
                f"[cost_cache] expected a drafter and policy 'goodput' with it, got drafter "
                f"{brief(spec)} and policy {policy!r}"
            )

        self._trace = TraceWriter(trace) if trace is not None else None
        self._metrics = MetricsObserver()
        opened = open_target(target, tokenizer=tokenizer, dtype=dtype, max_model_len=max_model_len)
        part: Parts | None = None
        try:
            if spec is not None:
                asked = Asked(
                    num_speculative_tokens, max_model_len, max_batch_size, verification, on
                )
                part = open_parts(spec, opened, asked)
                draft_tokens = part.draft_tokens
            speculation = Defaults(
                policy=policy,
                verification=verification,
                draft_tokens=draft_tokens,
                most_draft_tokens=part.most_draft_tokens if part is not None else None,
                has_drafter=part is not None,
                target_tpot_seconds=target_tpot_seconds,
                target_ttft_seconds=target_ttft_seconds,
                synthetic_acceptance_rates=rates,
                tells_laws=part is not None and part.tells_laws,
            )
            speculation.core_options(None)
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
                device=on,
            )
            if draft_tokens > 0 and max_num_batched_tokens < 2:
                raise InvalidArgumentError(
                    "[max_num_batched_tokens] expected at least 2 with a drafter, got 1"
                )
            if verification != "coupled" and spec is not None:
                check_full_drafts(sizes, draft_tokens, verification)
            fixed = part.fixed if part is not None else None
            check_room(plan_memory(opened.shape, shape, sizes, fixed), on)
            if part is not None:
                part.load()
            model = opened.load()
        finally:
            opened.close()
            if part is not None:
                part.close()

        team = _core.ThreadTeam(threads or 0, pin_threads)
        decoder = _core.Decoder(
            model,
            **sizes.target_options(),
            team=team,
            cpu_isa=isa,
            check_invariants=check_invariants,
        )
        frame = Frame(model, opened, sizes, team, isa, check_invariants)
        drafting = part.make(frame, decoder.memory.weights) if part is not None else None
        self._model: _core.Model | None = model
        self._scheduler = Scheduler(
            decoder,
            drafting,
            num_speculative_tokens=draft_tokens,
            max_batch_size=max_batch_size,
            max_queued_requests=max_queued_requests,
            observer=self._metrics if self._trace is None else Both(self._metrics, self._trace),
            preemption=preemption,
        )
        if policy == "goodput" and drafting is not None and draft_tokens > 0:
            # Drafters of one name and size can differ in depth, which `brief` tells.
            made = {"dtype": opened.shape.dtype, "device": on, "drafter_made": brief(spec)}
            kind = {"name": opened.name, "kv": kv_cache_dtype, **made}
            decoder.cost_model = cost_model_of(
                decoder, drafting.measurable, draft_tokens, costs, kind
            )
        self.verification: str = verification
        self.policy: str = policy
        self.num_speculative_tokens: int = draft_tokens
        self._tokenizer = opened.tokenizer
        self._intake = Intake(
            self._scheduler.open_decoder,
            tokenizer=opened.tokenizer,
            eos_token_ids=opened.eos_token_ids,
            vocab_size=opened.shape.config.vocab_size,
            speculation=speculation,
            trees=part.trees if part is not None else [],
            sizes=sizes,
        )
        self.default_sampling_params: SamplingParams = defaults
        """What requests without sampling_params get: the model's generation_config.json."""
        self._kv_cache_tokens = cache_tokens(opened.shape, sizes)
        self.name: str = opened.name
        self.dtype: str = opened.shape.dtype
        self.kv_cache_dtype: str = _core.resolve_kv_cache_dtype(kv_cache_dtype, self.dtype)
        self.max_model_len: int = sizes.max_model_len
        self.device: str = on
        self.cpu_isa: str = isa
        self.threads: int = team.size
        self._drafter_name = brief(spec)
        if self_test and drafting is not None and is_head(spec) and self._tokenizer:
            try_drafts(decoder, drafting.for_request(), self._tokenizer, repr(drafter))
        if self._trace is not None:
            self._trace.begin(
                decoder,
                self._tokenizer,
                model=self.name,
                dtype=self.dtype,
                cpu_isa=isa,
                threads=self.threads,
                drafter=self._drafter_name,
                num_speculative_tokens=draft_tokens,
                policy=policy,
                verification=verification,
            )

    # What it is.

    def __repr__(self) -> str:
        if self._model is None:
            return f"<Engine {self.name}: closed>"
        drafter = f"drafter {self._drafter_name}, policy {self.policy}"
        return (
            f"<Engine {self.name}: {self.dtype} on {self.device}, threads={self.threads}, "
            f"{drafter if self._drafter_name else 'no drafter'}>"
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the target came without one."""
        return self._tokenizer

    @property
    def memory(self) -> MemoryPlan:
        """Bytes held, by owner and purpose."""
        with self._scheduler.between_rounds() as decoder:
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

    def metrics(self) -> EngineMetrics:
        """What it has done so far, and what it is doing; waits for the round under way."""
        with self._scheduler.between_rounds() as decoder:
            waiting, running = self._scheduler.load
            return self._metrics.snapshot(
                decoder,
                model=self.name,
                waiting=waiting,
                running=running,
                kv_cache_tokens=self._kv_cache_tokens,
            )

    @property
    def cost_model(self) -> _core.CostModel:
        """What rounds cost in seconds, as policy "goodput" reckons now; printable."""
        with self._scheduler.between_rounds() as decoder:
            return decoder.cost_model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the packed target for `Engine(path)` and for C++'s `specrt::Model::map`.

        The name ends in .specrt. It holds config and weights, not the tokenizer. Raises LoadError.
        """
        name = os.fspath(path)
        if not isinstance(name, str) or not name.endswith(".specrt") or "\0" in name:
            raise InvalidArgumentError(f"[path] expected a name ending in .specrt, got {name!r}")
        self._open_decoder()
        model = self._model
        assert model is not None
        model.save(name)

    # What it does, for whoever waits.

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
        arrived = time.monotonic()
        single = is_prompt(prompts)
        batch: list[Any] = [prompts] if single else list(prompts)
        outputs = self._run(
            self._requests([self._intake.encode(one) for one in batch], sampling_params, arrived)
        )
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
        arrived = time.monotonic()
        single = is_conversation(messages)
        conversations: list[Any] = [messages] if single else list(messages)
        tokenizer = self._intake.need_tokenizer("chat")
        for one in conversations:
            check_conversation(one)
        prompts = [tokenizer.apply_chat_template(one, **template_options) for one in conversations]
        outputs = self._run(self._requests(prompts, sampling_params, arrived))
        return outputs[0] if single else outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[Increment, None, RequestOutput]:
        """Continue one prompt, yielding text and tokens as they become certain.

        The increments' texts and tokens, joined, are those of `generate`. The generator's return
        value is the RequestOutput; closing it early cancels the request.
        """
        return self._stream(self._requests([self._intake.encode(prompt)], sampling_params))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Generator[Increment, None, RequestOutput]:
        """`chat` for one conversation, yielding as `stream` does."""
        tokenizer = self._intake.need_tokenizer("chat")
        check_conversation(messages)
        prompt = tokenizer.apply_chat_template(messages, **template_options)
        return self._stream(self._requests([prompt], sampling_params))

    # What it does meanwhile.

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> RequestHandle:
        """Start a request and return at once; a thread of the engine's own runs it.

        The handle gives increments (`for`, `async for`) and the output (`result()`, `await`), and
        cancels. Of requests that wait, those of the smallest `priority` come first, then those that
        came first. May be called from any thread and from coroutines. Raises InvalidArgumentError,
        CapacityError for a request that could never fit, QueueFullError.
        """
        arrived = time.monotonic()
        return self._handle(self._intake.encode(prompt), sampling_params, priority, arrived)

    def chat_submit(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> RequestHandle:
        """`chat` for one conversation, as `submit` does."""
        arrived = time.monotonic()
        tokenizer = self._intake.need_tokenizer("chat")
        check_conversation(messages)
        prompt = tokenizer.apply_chat_template(messages, **template_options)
        return self._handle(prompt, sampling_params, priority, arrived)

    def close(self) -> None:
        """Free everything. Running requests end with an error. May be called twice."""
        self._scheduler.close()
        self._model = None
        if self._trace is not None:
            self._trace.close()

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

    @property
    def _decoder(self) -> _core.Decoder | None:
        return self._scheduler.decoder

    @property
    def _drafter(self) -> OwnDrafter | None:
        return self._scheduler.drafter

    def _open_decoder(self) -> _core.Decoder:
        return self._scheduler.open_decoder()

    def _requests(
        self,
        prompts: list[list[int]],
        given: SamplingParams | Sequence[SamplingParams] | None,
        arrived: float | None = None,
    ) -> list[list[Request]]:
        """arrived: when they were asked for, by time.monotonic; None: now."""
        return self._intake.requests(
            prompts,
            self.default_sampling_params if given is None else given,
            time.monotonic() if arrived is None else arrived,
        )

    def _run(self, groups: list[list[Request]]) -> list[RequestOutput]:
        requests = [one for group in groups for one in group]
        delivery = Delivery(len(requests), increments=False)
        self._scheduler.submit(requests, delivery)
        try:
            self._scheduler.wait(delivery)
        finally:
            self._scheduler.withdraw(requests)
        for one in requests:
            one.transcript.settle()
        errors = [one.failed_with for one in requests if one.failed_with is not None]
        if errors:
            outputs = [
                None if any(one.failed_with is not None for one in group) else request_output(group)
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
        delivery = Delivery(1)
        request.arrived = time.monotonic()
        self._scheduler.submit([request], delivery)
        try:
            while True:
                over = delivery.over
                if delivery.poll() is not None:
                    increment = request.increment()
                    if increment is None:  # its text cannot be made
                        return request_output([request])
                    yield increment
                elif over:
                    return request_output([request])
                else:
                    self._scheduler.advance(delivery)
        finally:
            self._scheduler.withdraw([request])

    def _handle(
        self, prompt: list[int], params: SamplingParams | None, priority: int, arrived: float
    ) -> RequestHandle:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidArgumentError(f"[priority] expected an integer, got {priority!r}")
        (samples,) = self._requests([prompt], params, arrived)
        for one in samples:
            one.priority = priority
        delivery = Delivery(len(samples))
        self._scheduler.submit(samples, delivery)
        handle = RequestHandle(self._scheduler, samples, delivery)
        try:
            self._scheduler.serve()
        except CapacityError:
            handle.cancel()
            raise
        return handle
