"""`Engine` as its callers meet it: prompts, streams, threads, errors, settings, its end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import Counting, assert_identities, assert_same, fingerprint, greedy

import specrt
from specrt import (
    Engine,
    InvalidArgumentError,
    LoadError,
    NumericError,
    SamplingParams,
    SpecrtError,
    UnsupportedError,
    _core,
)
from specrt.drafters import DraftModel, NGram
from specrt.planning import resolve_device

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 8, "threads": 1}
DIGITS = specrt.StructuredOutputs(regex="[0-9]+")


@pytest.fixture(scope="module")
def engine(l2: Path) -> Iterator[Engine]:
    with Engine(l2, "ngram", check_invariants=True, **SMALL) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine) -> Iterator[None]:
    """Every test leaves the shared engine as it found it: usable, with its whole cache free."""
    free = engine._decoder.free_kv_tokens
    yield
    assert engine._decoder.idle
    assert engine._decoder.free_kv_tokens == free
    assert engine.memory.drafter_index == 0
    assert len(engine.generate([1, 2], greedy(3)).token_ids) == 3


# Prompts.


def test_one_prompt_or_several(engine: Engine) -> None:
    params = greedy(8)
    text, ids = "ab ab ab", list(b"ab ab ab")
    one = engine.generate(text, params)
    assert isinstance(one, specrt.RequestOutput)
    assert one.prompt_token_ids == ids
    assert_same([engine.generate(ids, params)], [one], "ids")
    assert_same([engine.generate(tuple(ids), params)], [one], "tuple")
    assert_same([engine.generate(np.array(ids), params)], [one], "array")
    assert_same(engine.generate([text], params), [one], "list of one")
    assert_same(engine.generate([ids], params), [one], "list of one")
    assert_same(engine.generate([text, ids, text], params), [one] * 3, "mixed")
    assert_same(engine.generate((text, ids), [params, params]), [one] * 2, "tuple of two")
    assert engine.generate([], params) == []
    assert engine.generate([]) == []
    assert engine.generate([], []) == []


def test_default_parameters(engine: Engine) -> None:
    output = engine.generate([1])
    assert len(output.token_ids) == 159  # up to max_model_len, which comes before max_tokens
    assert output.lossless is True
    assert output.logprobs is None
    with pytest.raises(TypeError):
        engine.generate("a", max_tokens=3)  # type: ignore[call-overload]


def test_parameters_one_each(engine: Engine) -> None:
    params = [greedy(count) for count in (1, 5, 3)]
    outputs = engine.generate(["a", [98], "c"], params)
    assert [len(one.token_ids) for one in outputs] == [1, 5, 3]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (3, None),
        (None, None),
        (b"ab", None),
        ({"role": "user"}, None),
        ([1.5], None),
        ([1, "a"], None),
        (["a", 1], None),
        ([[1], 2], None),
        ([True], None),
        ([None], None),
        ([[1, None]], None),
        ([-1], None),
        ([264], None),
        ([2**31], None),
        ([2**80], None),
        ([[[1]]], None),
        ("\ud800", None),
        (np.zeros((2, 2), int), None),
        ([], [greedy(1)]),
        ("a", [greedy(1), greedy(1)]),
        (["a", "b"], [greedy(1)]),
        ("a", {"max_tokens": 3}),
        (["a"], [None]),
        (["a"], [3]),
        ("a", 3),
    ],
    ids=str,
)
def test_bad_prompts_and_parameters(engine: Engine, prompt: Any, params: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^\[(prompt|text|sampling_params)\]"):
        engine.generate(prompt, params)


def test_one_bad_request_stops_all_before_anything_runs(counter: Path) -> None:
    calls: list[int] = []

    class Counted(Counting):
        def propose(self, tokens: list[int], budget: int) -> specrt.DraftTree | None:
            calls.append(1)
            return super().propose(tokens, budget)

    with Engine(counter, Counted(), **SMALL) as engine:
        for prompts, params in (
            ([[1], [2], [256]], greedy(5)),
            ([[1], [2], []], greedy(5)),
            ([[1], [2], [3] * 160], greedy(5)),
            ([[1], [2]], [greedy(5), greedy(5, logprobs=257)]),
            ([[1], [2]], [greedy(5), greedy(5, stop_token_ids=[256])]),
            ([[1], [2]], [greedy(5), greedy(5, logit_bias={256: 1.0})]),
            ([[1], [2]], [greedy(5), greedy(5, allowed_token_ids=[256])]),
            ([[1], [2]], [greedy(5), greedy(5, prompt_logprobs=257)]),
        ):
            with pytest.raises(InvalidArgumentError):
                engine.generate(prompts, params)
            assert not calls
            assert engine._decoder.idle
        with pytest.raises(InvalidArgumentError):
            engine.stream([256], greedy(5))  # not only at the first next()


def test_chat(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    expected = engine.generate(text, greedy(6))
    assert expected.prompt_token_ids[0] == 258
    assert_same([engine.chat(messages, greedy(6))], [expected], "one")
    assert_same(engine.chat([messages, messages], greedy(6)), [expected] * 2, "two")
    stream = engine.chat_stream(messages, greedy(6))
    assert [token for one in stream for token in one.token_ids] == expected.token_ids
    bare = engine.chat(messages, greedy(1), add_generation_prompt=False)
    written = engine.tokenizer.decode(bare.prompt_token_ids, skip_special_tokens=False)
    assert written == text.removesuffix("<|im_start|>assistant\n")
    assert engine.chat([], greedy(1)) == []
    wrong: list[Any] = ["hi", ["hi"], [3], 3, None, messages[0], [*messages, 3], [messages, "hi"]]
    for one in wrong:
        with pytest.raises(InvalidArgumentError, match=r"\[messages\]"):
            engine.chat(one, greedy(1))
        with pytest.raises(InvalidArgumentError, match=r"\[messages\]"):
            engine.chat_stream(one, greedy(1))


def test_without_a_tokenizer(tmp_path: Path) -> None:
    model = tiny.tiny_llama(tmp_path / "bare")
    with Engine(model, "ngram", **SMALL) as engine:
        assert engine.tokenizer is None
        output = engine.generate([1, 2, 3], greedy(5, logprobs=1))
        assert len(output.token_ids) == 5
        assert output.text == ""
        increments = list(engine.stream([1, 2, 3], greedy(5)))
        assert [token for one in increments for token in one.token_ids] == output.token_ids
        for call in (
            lambda: engine.generate("a"),
            lambda: engine.chat([{"role": "user", "content": "a"}]),
            lambda: engine.generate([1], greedy(5, stop="a")),
            lambda: engine.generate([1], greedy(5, bad_words=["a"])),
            lambda: engine.generate([1], greedy(5, structured_outputs=DIGITS)),
        ):
            with pytest.raises(InvalidArgumentError, match="tokenizer"):
                call()


def test_tokenizer_of_ones_own(tmp_path: Path, l2: Path) -> None:
    model = tiny.tiny_llama(tmp_path / "bare", vocab=264)
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate("abc", greedy(20))
        tokenizer = engine.tokenizer
    for given in (tokenizer, tokenizer.hf, tokenizer.backend, str(l2), l2):
        with Engine(model, tokenizer=given, **SMALL) as engine:
            assert_same([engine.generate("abc", greedy(20))], [expected], given)


# Streams.


@pytest.mark.parametrize("params", [
    greedy(40), greedy(0), greedy(1), greedy(40, temperature=1.5, seed=3, logprobs=1),
    greedy(200), greedy(40, temperature=1.5, seed=5, stop=["e", "t", "\ufffd\ufffd"]),
], ids=["plain", "none", "one", "sampled", "edge", "stop"])  # fmt: skip
def test_stream_joined_is_generate(engine: Engine, params: SamplingParams) -> None:
    expected = engine.generate("ababab", params)
    stream = engine.stream("ababab", params)
    increments = []
    while True:
        try:
            increments.append(next(stream))
        except StopIteration as end:
            output = end.value
            break
    assert fingerprint(output) == fingerprint(expected)
    assert "".join(one.text for one in increments) == expected.text
    assert [token for one in increments for token in one.token_ids] == expected.token_ids
    assert all(one.text or one.token_ids for one in increments[:-1])
    ends = [one.finish_reason for one in increments]
    assert ends == [""] * (len(ends) - 1) + [output.outputs[0].finish_reason]
    # The same rounds, drafts and acceptances as in a batch.
    for name in ("rounds", "drafted_tokens", "accepted_tokens", "truncated_rounds"):
        assert getattr(output.metrics, name) == getattr(expected.metrics, name)


def test_stream_gives_a_round_at_a_time(counter: Path) -> None:
    with Engine(counter, Counting(), num_speculative_tokens=3, **SMALL) as engine:
        sizes = [len(one.token_ids) for one in engine.stream([1], greedy(14))]
    assert sizes == [1, 4, 4, 4, 1]


def test_streams_side_by_side(engine: Engine) -> None:
    params = greedy(30)
    expected = [engine.generate([i, i], params) for i in range(4)]
    streams = [engine.stream([i, i], params) for i in range(4)]
    tokens: list[list[int]] = [[] for _ in streams]
    running = list(range(4))
    while running:
        for row in list(running):
            one = next(streams[row], None)
            if one is None:
                running.remove(row)
            else:
                tokens[row] += one.token_ids
    assert tokens == [one.token_ids for one in expected]


def test_stream_left_early(engine: Engine) -> None:
    free = engine._decoder.free_kv_tokens
    params = greedy(100)
    expected = engine.generate([5, 6], params)
    for steps in range(4):
        stream = engine.stream([5, 6], params)
        for _ in range(steps):
            next(stream)
        if steps:
            assert engine._decoder.free_kv_tokens < free
        stream.close()
        stream.close()  # twice
        assert engine._decoder.free_kv_tokens == free
        assert engine._decoder.idle
    # Left while others run, and while waiting for a place.
    others = [engine.stream([5, 6], params) for _ in range(8)]
    for one in others:
        next(one)
    waiting = engine.stream([7, 8], params)
    thread = threading.Thread(target=lambda: next(waiting, None))
    thread.start()
    others[3].close()  # makes room for it
    thread.join(60)
    assert not thread.is_alive()
    waiting.close()
    for row, one in enumerate(others):
        rest = [token for increment in one for token in increment.token_ids]
        assert row == 3 or rest == expected.token_ids[-len(rest) :]
    # Dropped without a word.
    stream = engine.stream([5, 6], params)
    next(stream)
    del stream
    assert engine._decoder.idle


def test_stream_never_started(engine: Engine) -> None:
    stream = engine.stream([1, 2], greedy(5))
    assert engine._decoder.idle
    del stream


# Threads.


def test_two_threads_of_twenty_requests(l2: Path) -> None:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, 256, draw.integers(1, 30)).tolist() for _ in range(40)]
    params = [
        SamplingParams(max_tokens=int(draw.integers(1, 40)), seed=i, temperature=i % 3 / 2)
        for i in range(40)
    ]
    for drafter in (None, NGram(prompt_lookup_min=1), DraftModel(model=l2)):
        with Engine(l2, drafter, check_invariants=True, **SMALL) as engine:
            pairs = list(zip(prompts, params, strict=True))
            expected = [engine.generate(prompt, one) for prompt, one in pairs]
            results: dict[int, Any] = {}

            def work(rows: range, engine: Engine = engine, results: dict = results) -> None:
                for row in rows:
                    if row % 2:
                        results[row] = engine.generate(prompts[row], params[row])
                    else:
                        stream = engine.stream(prompts[row], params[row])
                        results[row] = finish(stream)

            threads = [threading.Thread(target=work, args=(range(i, 40, 2),)) for i in (0, 1)]
            threads += [threading.Thread(target=work, args=(range(0),))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive()
            assert_same([results[row] for row in range(40)], expected, drafter)
            assert engine._decoder.idle


def finish(stream: Any) -> specrt.RequestOutput:
    """A stream's return value."""
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


# Errors of models, and what comes after errors.


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts; what follows token 100 or 150 is NaN."""
    from safetensors.numpy import load_file, save_file

    path = tiny.byte_tokenizer(tiny.counter(tmp_path_factory.mktemp("models") / "nan", 256))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][100] = np.nan
    tensors["model.embed_tokens.weight"][150] = np.inf
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_nan_logits_end_their_own_request(broken: Path) -> None:
    for drafter in (None, Counting(), NGram(prompt_lookup_min=1), DraftModel(model=broken)):
        with Engine(broken, drafter, check_invariants=True, **SMALL) as engine:
            free = engine._decoder.free_kv_tokens
            for params in (greedy(20), greedy(20, temperature=1.0), greedy(20, logprobs=3)):
                prompts = [[1], [90], [30], [100], [145], [170, 171]]
                with pytest.raises(NumericError, match=r"\[logits\].*NaN") as caught:
                    engine.generate(prompts, params)
                outputs = caught.value.outputs
                assert [one is None for one in outputs] == [False, True, False, True, True, False]
                for prompt, output in zip(prompts, outputs, strict=True):
                    if output is not None:
                        wanted = list(range(prompt[-1] + 1, prompt[-1] + 21))
                        assert output.token_ids == wanted
                        assert_identities(output)
                with pytest.raises(NumericError, match=r"1 prompt tokens.*position 11"):
                    engine.generate([90], params)
                # Up to where it breaks, all is well.
                assert engine.generate([90], greedy(10)).token_ids == list(range(91, 101))
                stream = engine.stream([95], params)
                with pytest.raises(NumericError):
                    for _ in stream:
                        pass
                assert engine._decoder.free_kv_tokens == free


def test_nan_in_a_draft_that_is_not_taken(broken: Path) -> None:
    class Poison(specrt.Drafter):
        """The right chain, and beside each of its nodes one whose keys and values are NaN."""

        def propose(self, tokens: list[int], budget: int) -> specrt.DraftTree:
            last = tokens[-1]
            return specrt.DraftTree([100, last + 1, 150, last + 2, 100, 100], [-1, -1, 0, 1, 1, 3])

    prompts = [[1], [40, 41]]
    for options in ({"block_size": 1}, {"block_size": 16}):
        with Engine(broken, Poison(), num_speculative_tokens=6, **SMALL, **options) as engine:
            outputs = engine.generate(prompts, greedy(50, logprobs=1))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == list(range(prompt[-1] + 1, prompt[-1] + 51))
            assert output.metrics.acceptance_length == 3.0


def test_nan_in_a_vocabulary_of_odd_size(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = tiny.tiny_llama(tmp_path / "odd", vocab=131)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][:] = np.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for isa in specrt.available_cpu_isas():
        with Engine(path, "ngram", cpu_isa=isa, **SMALL) as engine:
            for params in (greedy(5), greedy(5, temperature=1.0, top_k=4)):
                with pytest.raises(NumericError):
                    engine.generate([1, 2, 3], params)


def test_engine_lives_through_every_error(engine: Engine) -> None:
    expected = engine.generate([1, 2, 1, 2], greedy(30))
    wrong: list[Callable[[], Any]] = [
        lambda: engine.generate([999]),
        lambda: engine.generate([[]]),
        lambda: engine.generate([1] * 160),
        lambda: engine.generate("a", greedy(1, logprobs=10**6)),
        lambda: engine.save("weights.bin"),
        lambda: engine.generate(3),
    ]
    for call in wrong:
        with pytest.raises(SpecrtError):
            call()
        assert_same([engine.generate([1, 2, 1, 2], greedy(30))], [expected], call)


# The end.


def test_close(l2: Path) -> None:
    engine = Engine(l2, "ngram", **SMALL)
    stream = engine.stream([1, 2], greedy(50))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(SpecrtError, match="closed"):
        list(stream)
    for call in (
        lambda: engine.generate([1]),
        lambda: engine.generate([[1], [2]]),
        lambda: next(engine.stream([1])),
        lambda: engine.chat([{"role": "user", "content": "a"}]),
        lambda: engine.memory,
        lambda: engine.save("x.specrt"),
    ):
        with pytest.raises(InvalidArgumentError, match="closed"):
            call()
    assert not Path("x.specrt").exists()


def test_close_while_others_wait(counter: Path) -> None:
    started = threading.Event()
    errors: list[BaseException] = []

    class Signal(Counting):
        def propose(self, tokens: list[int], budget: int) -> specrt.DraftTree | None:
            started.set()
            time.sleep(0.001)  # so that the run cannot be over before the close
            return None

    engine = Engine(counter, Signal(), max_model_len=4000, max_batch_size=2, threads=1)

    def work() -> None:
        try:
            engine.generate([[1], [2], [3]], greedy(3000))
        except SpecrtError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert "closed" in str(errors[0])


def test_context_manager(l2: Path) -> None:
    with Engine(l2, **SMALL) as engine:
        assert engine.generate([1], greedy(2)).token_ids
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.generate([1])
    with pytest.raises(ZeroDivisionError), Engine(l2, **SMALL) as engine:
        raise ZeroDivisionError
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.generate([1])


# Settings.


@pytest.mark.skipif(_core.cuda_built(), reason="this build has CUDA")
def test_a_build_without_cuda_says_so(l2):
    with pytest.raises(UnsupportedError, match="built without CUDA"):
        Engine(l2, device="cuda", **SMALL)
    with pytest.raises(UnsupportedError, match="built without CUDA"):
        _core.cuda_devices()


def test_devices_are_named_or_refused(monkeypatch):
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    monkeypatch.setattr(_core, "cuda_devices", lambda: ["one", "two"])
    assert resolve_device("cuda") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"
    for other in ("cuda:2", "cuda:", "cuda:x", "cuda:-1", "gpu", 1, None):
        with pytest.raises(InvalidArgumentError, match=r"\[device\]"):
            resolve_device(other)
    monkeypatch.setattr(_core, "cuda_devices", list)
    with pytest.raises(UnsupportedError, match="none here"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("device", "gpu", InvalidArgumentError),
        ("device", None, InvalidArgumentError),
        ("device", 0, InvalidArgumentError),
        ("device", np.ones(2), InvalidArgumentError),
        ("device", "cuda", UnsupportedError),
        ("device", "cuda:1", UnsupportedError),
        ("dtype", "float8", InvalidArgumentError),
        ("dtype", "float16", UnsupportedError),
        ("dtype", "int2", InvalidArgumentError),
        ("threads", 0, InvalidArgumentError),
        ("threads", -1, InvalidArgumentError),
        ("threads", 1.5, InvalidArgumentError),
        ("threads", True, InvalidArgumentError),
        ("threads", 2**40, InvalidArgumentError),
        ("max_model_len", 0, InvalidArgumentError),
        ("max_model_len", "long", InvalidArgumentError),
        ("max_model_len", 2049, InvalidArgumentError),
        ("kv_cache_bytes", 0, InvalidArgumentError),
        ("kv_cache_bytes", 1e9, InvalidArgumentError),
        ("max_batch_size", 0, InvalidArgumentError),
        ("max_batch_size", 2**40, InvalidArgumentError),
        ("max_num_batched_tokens", 0, InvalidArgumentError),
        ("max_num_batched_tokens", 3, InvalidArgumentError),  # less than max_batch_size
        ("max_num_batched_tokens", 2**30, InvalidArgumentError),
        ("block_size", 0, InvalidArgumentError),
        ("block_size", 2**20, InvalidArgumentError),
        ("kv_cache_dtype", "fp8", InvalidArgumentError),
        ("kv_cache_dtype", "fp8_e5m2", InvalidArgumentError),
        ("kv_cache_dtype", "", InvalidArgumentError),
        ("kv_cache_dtype", None, InvalidArgumentError),
        ("kv_cache_dtype", "\ud800", InvalidArgumentError),
        ("verification", "exact", InvalidArgumentError),
        ("verification", None, InvalidArgumentError),
        ("cpu_isa", "neon", InvalidArgumentError),
        ("cpu_isa", None, InvalidArgumentError),
        ("cpu_isa", "\ud800", InvalidArgumentError),
        ("tokenizer", 3, InvalidArgumentError),
    ],
)
def test_bad_settings_are_refused_by_name(
    l2: Path, name: str, value: Any, kind: type[SpecrtError]
) -> None:
    with pytest.raises(kind, match=rf"\[{name}\]"):
        Engine(l2, **{**SMALL, name: value})


def test_a_pass_without_room_for_any_draft_is_refused(l2: Path) -> None:
    one = {**SMALL, "max_batch_size": 1, "max_num_batched_tokens": 1}
    with pytest.raises(InvalidArgumentError, match=r"\[max_num_batched_tokens\]"):
        Engine(l2, "ngram", **one)
    with Engine(l2, **one) as plain, Engine(l2, "ngram", num_speculative_tokens=0, **one) as off:
        assert (
            plain.generate([1, 2], greedy(4)).token_ids == off.generate([1, 2], greedy(4)).token_ids
        )


def test_settings_tell_what_runs(l2: Path) -> None:
    with Engine(l2, **{**SMALL, "threads": 2}) as engine:
        assert engine.threads == 2
        assert engine.cpu_isa == specrt.cpu_isa()
        assert engine.dtype == "float32"
        assert engine.kv_cache_dtype == "float32"
        assert engine.max_model_len == 160
        assert engine.verification == "coupled"
    for verification in ("coupled", "rejection", "block", "typical"):
        with Engine(l2, "ngram", verification=verification, **SMALL) as engine:
            assert engine.verification == verification
    for isa in specrt.available_cpu_isas():
        with Engine(l2, cpu_isa=isa, **SMALL) as engine:
            assert engine.cpu_isa == engine._decoder.cpu_isa == isa


def test_engine_of_nothing() -> None:
    for target in ("no/such/folder/anywhere", Path("nowhere.gguf"), "nowhere.specrt"):
        with pytest.raises(LoadError):
            Engine(target)
    for target in (None, 3, object()):
        with pytest.raises((LoadError, InvalidArgumentError)):
            Engine(target)


# Importing.


@pytest.mark.alone
def test_import_is_quick_and_light() -> None:
    script = (
        "import sys, time; start = time.process_time(); import specrt\n"
        "print(time.process_time() - start)\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'gguf', 'safetensors', 'jinja2', 'rich')\n"
        "print([one for one in heavy if one in sys.modules])\n"
    )
    times = []
    for _ in range(5):  # the machine may be busy: the best of five counts
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        seconds, heavy = done.stdout.splitlines()
        assert heavy == "[]"
        times.append(float(seconds))
        if times[-1] < 0.5:
            return
    pytest.fail(f"import specrt took {times} seconds of processor time")
