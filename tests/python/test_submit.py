"""Requests in the background: handles, asyncio, cancelling, closing, full queues."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Counting, assert_same, fingerprint, greedy

import specrt
import specrt.observer
from specrt import (
    CapacityError,
    DraftTree,
    Engine,
    InvalidArgumentError,
    QueueFullError,
    SamplingParams,
    SpecrtError,
)
from specrt.scheduler import OVERTAKEN_AT_MOST

SMALL: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 64, "threads": 1}


@pytest.fixture(scope="module")
def engine(l2: Path) -> Iterator[Engine]:
    with Engine(l2, "ngram", max_model_len=256, check_invariants=True, **SMALL) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine) -> Iterator[None]:
    decoder = engine._decoder
    assert decoder is not None
    free = decoder.free_kv_tokens
    yield
    wait_until(lambda: decoder.idle)
    assert decoder.free_kv_tokens == free


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def collect(handle: specrt.RequestHandle, tokens: list[int]) -> None:
    for increment in handle:
        tokens += increment.token_ids


class Paced(Counting):
    """Counts right, as slowly as it is told; says when it was first asked."""

    def __init__(self, seconds: float = 0.002) -> None:
        super().__init__()
        self.seconds = seconds
        self.asked = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        self.asked.set()
        assert self.go.wait(60)
        time.sleep(self.seconds)
        return super().propose(tokens, min(budget, 1))


SEVERAL = [
    greedy(30),
    greedy(40, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=25, temperature=1.0, seed=5, n=3),
    SamplingParams(max_tokens=60, temperature=0.8, seed=1, stop=["\x03"]),
]


@pytest.mark.parametrize("params", SEVERAL)
def test_a_handle_gives_what_generate_gives(engine: Engine, params: SamplingParams) -> None:
    expected = engine.generate([1, 2, 3], params)
    output = engine.submit([1, 2, 3], params).result(60)
    assert_same([output], [expected], "result")

    handle = engine.submit([1, 2, 3], params)
    texts, tokens = [""] * params.n, [[] for _ in range(params.n)]
    for increment in handle:
        texts[increment.index] += increment.text
        tokens[increment.index] += increment.token_ids
    assert handle.done
    assert texts == [one.text for one in expected.outputs]
    assert tokens == [one.token_ids for one in expected.outputs]
    assert_same([handle.result(), handle.result(0)], [expected] * 2, "after iterating")
    assert list(handle) == []


def test_asyncio(engine: Engine) -> None:
    expected = engine.generate([[1, 2], [3, 4], [5]], greedy(40))

    async def streamed(prompt: list[int]) -> str:
        return "".join([one.text async for one in engine.submit(prompt, greedy(40))])

    async def main() -> None:
        outputs = await asyncio.gather(
            *(_await(engine.submit(one, greedy(40))) for one in ([1, 2], [3, 4], [5]))
        )
        assert_same(outputs, expected, "awaited")
        texts = await asyncio.gather(*(streamed(one) for one in ([1, 2], [3, 4], [5])))
        assert texts == [one.text for one in expected]
        handle = engine.submit([5], greedy(40))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(engine.submit([1], greedy(200))), 1e-4)
        both = await asyncio.gather(_await(handle), _await(handle))
        assert_same(both, [expected[2]] * 2, "two that await one")

    asyncio.run(main())


def test_event_loops_come_and_go(engine: Engine) -> None:
    """One after the other and side by side; none leaves an open file behind."""

    async def work(count: int) -> list[str]:
        handles = [engine.submit([1, row], greedy(20)) for row in range(count)]
        return [one.text for one in await asyncio.gather(*map(_await, handles))]

    async def read(count: int) -> list[str]:
        handles = [engine.submit([1, row], greedy(20)) for row in range(count)]
        texts = [""] * count
        for row, handle in enumerate(handles):
            async for one in handle:
                texts[row] += one.text
        return texts

    expected = [engine.generate([1, row], greedy(20)).text for row in range(6)]
    results: list[list[str]] = []
    asyncio.run(work(1))
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for turn in range(12):
        assert asyncio.run((work, read)[turn % 2](6)) == expected
    threads = [
        threading.Thread(target=lambda how=how: results.append(asyncio.run(how(6))))  # type: ignore[misc]
        for how in (work, read) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected] * 6
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


def test_loops_that_close_while_tasks_wait_are_let_go_of(engine: Engine) -> None:
    from specrt import bells

    def leave() -> None:
        loop = asyncio.new_event_loop()
        handle = engine.submit([1, 2], greedy(100))

        async def read() -> None:
            async for _ in handle:
                pass

        task = loop.create_task(read())
        loop.run_until_complete(asyncio.sleep(0.001))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        with contextlib.suppress(SpecrtError):
            handle.result(60)

    for _ in range(5):
        leave()
    gc.collect()
    files, kept = len(os.listdir("/proc/self/fd")), len(bells._BELLS)
    for _ in range(20):
        leave()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert len(bells._BELLS) <= kept + 1


def test_a_loop_that_waits_for_no_pipes(engine: Engine) -> None:
    """As Windows' own."""

    class Plain(asyncio.SelectorEventLoop):
        def add_reader(self, *_: Any) -> None:
            raise NotImplementedError

    async def work() -> str:
        handle = engine.submit([1, 2], greedy(40))
        texts = [one.text async for one in handle]
        assert (await engine.submit([1, 2], greedy(40))).text == "".join(texts)
        return "".join(texts)

    loop = Plain()
    try:
        assert loop.run_until_complete(work()) == engine.generate([1, 2], greedy(40)).text
    finally:
        loop.close()
    engine.submit([1, 2], greedy(3)).result(60)


def test_a_task_that_leaves_while_it_waits(counter: Path) -> None:
    """Nobody is woken in its stead, and the next one to wait is."""

    async def work(engine: Engine) -> None:
        handle = engine.submit([1], greedy(400, ignore_eos=True))
        tokens: list[int] = []
        for _ in range(20):
            with contextlib.suppress(asyncio.TimeoutError):
                tokens += (await asyncio.wait_for(handle.__anext__(), 0.0005)).token_ids
        async for one in handle:
            tokens += one.token_ids
        assert tokens == (await handle).token_ids

    with Engine(counter, Paced(), max_model_len=600, **SMALL) as engine:
        asyncio.run(asyncio.wait_for(work(engine), 60))


async def _await(handle: specrt.RequestHandle) -> specrt.RequestOutput:
    return await handle


def test_chat_submit(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hello \U0001f600 你好"}]
    expected = engine.chat(messages, greedy(20))
    assert_same([engine.chat_submit(messages, greedy(20)).result(60)], [expected], "chat")
    with pytest.raises(InvalidArgumentError, match="messages"):
        engine.chat_submit("hello")  # type: ignore[arg-type]


def test_everything_together(l2: Path) -> None:
    """Handles, generate and streams from several threads share rounds and change nothing."""
    params = [SamplingParams(max_tokens=30, temperature=0.7, seed=one) for one in range(6)]
    prompts = [[one, one + 1, one] for one in range(6)]
    wrong: list[Any] = []
    with Engine(l2, "ngram", check_invariants=True, **SMALL) as engine:
        expected = [fingerprint(one) for one in engine.generate(prompts, params)]

        def check(row: int, output: specrt.RequestOutput) -> None:
            if fingerprint(output) != expected[row]:
                wrong.append((row, output))

        def work(kind: int) -> None:
            for _ in range(3):
                if kind == 0:
                    for row, output in enumerate(engine.generate(prompts, params)):
                        check(row, output)
                elif kind == 1:
                    handles = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
                    for row, handle in enumerate(handles):
                        check(row, handle.result(120))
                else:
                    for row, pair in enumerate(zip(prompts, params, strict=True)):
                        stream = engine.stream(*pair)
                        try:
                            while True:
                                next(stream)
                        except StopIteration as end:
                            check(row, end.value)

        threads = [threading.Thread(target=work, args=(one % 3,)) for one in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert engine.memory.target_weights > 0  # which takes its turn
    assert wrong == []


# Leaving early.


def test_cancel_at_every_moment(counter: Path) -> None:
    drafter = Paced()
    with Engine(counter, drafter, max_model_len=3000, check_invariants=True, **SMALL) as engine:
        decoder = engine._decoder
        assert decoder is not None
        free = decoder.free_kv_tokens
        drafter.go.clear()
        running = engine.submit([1], greedy(2000))
        assert drafter.asked.wait(60)  # in the middle of a round
        late = engine.submit([7], greedy(2000))
        late.cancel()  # before it ran
        late.cancel()
        running.cancel()  # in mid-round
        assert not running.done
        drafter.go.set()
        for handle in (running, late):
            output = handle.result(60)
            assert output.outputs[0].finish_reason == "abort"
            start = output.prompt_token_ids[0] + 1
            tokens = output.token_ids
            assert tokens == [(start + one) % 256 for one in range(len(tokens))]
            assert handle.done
        assert late.result().token_ids == []
        prefill = engine.submit(list(range(250)) * 8, greedy(5))
        prefill.cancel()  # perhaps between two chunks
        assert prefill.result(60).outputs[0].finish_reason in ("abort", "length")
        done = engine.submit([3], greedy(3))
        assert done.result(60).outputs[0].finish_reason == "length"
        done.cancel()  # too late
        assert done.result().outputs[0].finish_reason == "length"
        wait_until(lambda: decoder.idle)
        assert decoder.free_kv_tokens == free
        # A full place of cancelled ones holds nobody up.
        handles = [engine.submit([one], greedy(500)) for one in range(12)]
        for handle in handles[:-1]:
            handle.cancel()
        assert len(handles[-1].result(60).token_ids) == 500
        assert decoder.free_kv_tokens == free


def test_a_cancelled_request_tells_what_it_did(counter: Path) -> None:
    with Engine(counter, Paced(), max_model_len=3000, **SMALL) as engine:
        handle = engine.submit([1], greedy(2500))
        text = next(handle).text + next(handle).text
        handle.cancel()
        rest = "".join(one.text for one in handle)
        output = handle.result(60)
        assert output.text == text + rest
        metrics = output.metrics
        assert metrics.completion_tokens == len(output.token_ids)
        assert metrics.completion_tokens == 1 + metrics.accepted_tokens + metrics.rounds


def test_handles_let_go_of_cancel(counter: Path) -> None:
    with Engine(counter, Paced(), max_model_len=3000, **SMALL) as engine:
        decoder = engine._decoder
        assert decoder is not None
        for increment in engine.submit([1], greedy(2900)):
            assert increment.token_ids
            break
        wait_until(lambda: decoder.idle)

        class Holder:
            def __init__(self) -> None:
                self.me = self
                self.handle = engine.submit([1], greedy(2900))

        for _ in range(3):
            Holder()
        gc.collect()
        wait_until(lambda: decoder.idle)

        async def leave() -> None:
            async for _ in engine.submit([1], greedy(2900)):
                break

        asyncio.run(leave())
        wait_until(lambda: decoder.idle)


def test_finished_in_the_round_of_anothers_cancel(counter: Path) -> None:
    drafter = Paced(0)
    with Engine(counter, drafter, max_model_len=3000, **SMALL) as engine:
        decoder = engine._decoder
        assert decoder is not None
        free = decoder.free_kv_tokens
        for _ in range(20):
            drafter.go.clear()
            drafter.asked.clear()
            ends = engine.submit([1], greedy(2))
            goes = engine.submit([9], greedy(2000))
            assert drafter.asked.wait(60) or True
            goes.cancel()
            drafter.go.set()
            assert ends.result(60).token_ids == [2, 3]
            goes.result(60)
        wait_until(lambda: decoder.idle)
        assert decoder.free_kv_tokens == free
    scheduler = engine._scheduler
    assert not scheduler._running
    assert not scheduler._waiting
    assert not scheduler._left


# Errors.


def test_bad_requests_are_refused_at_submit(engine: Engine) -> None:
    for call in (
        lambda: engine.submit([]),
        lambda: engine.submit([1, -1]),
        lambda: engine.submit([1] * 256),
        lambda: engine.submit([1], priority=1.5),  # type: ignore[arg-type]
        lambda: engine.submit([1], priority=True),
        lambda: engine.submit([1], SamplingParams(max_tokens=5, bad_words=[""])),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    with pytest.raises(InvalidArgumentError, match="max_queued_requests"):
        Engine("nowhere", max_queued_requests=0)


def test_what_can_never_fit_is_refused_with_the_numbers(l2: Path) -> None:
    with Engine(l2, kv_cache_bytes=140_000, max_model_len=1024, **SMALL) as engine:
        assert engine._decoder is not None
        room = engine._decoder.free_kv_tokens
        assert room < 400
        with pytest.raises(CapacityError, match=f"room for 499 tokens.*{room} tokens in all"):
            engine.submit([1, 2], greedy(498))
        expected = engine.generate([1, 2], greedy(20))
        assert_same([engine.submit([1, 2], greedy(20)).result(60)], [expected], "afterwards")


def test_an_error_harms_nobody_else(l2: Path) -> None:
    class Fails(specrt.Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            if tokens[0] == 99 and len(tokens) > 6:
                raise ValueError("no more")
            return DraftTree.chain(tokens[-2:][:budget])

    with Engine(l2, Fails(), **SMALL) as engine:
        expected = engine.generate([[1], [2]], greedy(40))
        good = [engine.submit([one], greedy(40)) for one in (1, 2)]
        bad = engine.submit([99], greedy(40))
        with pytest.raises(SpecrtError, match="no more"):
            bad.result(60)
        with pytest.raises(SpecrtError, match="no more"):
            list(bad)
        assert bad.done

        async def wait() -> None:
            with pytest.raises(SpecrtError, match="no more"):
                await engine.submit([99], greedy(40))

        asyncio.run(wait())
        assert_same([one.result(60) for one in good], expected, "beside it")


def test_timeout(counter: Path) -> None:
    with Engine(counter, Paced(), max_model_len=3000, **SMALL) as engine:
        handle = engine.submit([1], greedy(200))
        with pytest.raises(TimeoutError):
            handle.result(0.001)
        assert len(handle.result(60).token_ids) == 200


@pytest.mark.parametrize("timeout", ["1", -1, float("nan"), True, b""])
def test_timeouts_that_are_none(engine: Engine, timeout: Any) -> None:
    handle = engine.submit([1, 2], greedy(2))
    with pytest.raises(InvalidArgumentError, match=r"\[timeout\]"):
        handle.result(timeout)
    assert handle.result(1e300).token_ids == handle.result(2**70).token_ids


def test_waiting_inside_a_round_is_refused(l2: Path) -> None:
    class Calls(specrt.Drafter):
        handle: specrt.RequestHandle | None = None

        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            if tokens[0] == 1 and self.handle is not None:
                self.handle.result()
            return None

    drafter = Calls()
    with Engine(l2, drafter, **SMALL) as engine:
        drafter.handle = engine.submit([2], greedy(200))
        with pytest.raises(SpecrtError, match="from inside a drafter"):
            engine.submit([1], greedy(10)).result(60)
        assert len(drafter.handle.result(60).token_ids) == 200


# Queues.


def test_a_full_queue_says_so(counter: Path) -> None:
    drafter = Paced()
    options = {**SMALL, "max_batch_size": 1}
    with Engine(counter, drafter, max_model_len=3000, max_queued_requests=2, **options) as engine:
        # One finds a place, two wait.
        assert len(engine.generate([[1], [2], [3]], greedy(2))) == 3
        with pytest.raises(QueueFullError, match="max_queued_requests"):
            engine.generate([[1], [2], [3], [4]], greedy(2))
        drafter.go.clear()
        handles = [engine.submit([1], greedy(50))]
        assert drafter.asked.wait(60)
        handles += [engine.submit([one], greedy(50)) for one in (2, 3)]
        with pytest.raises(QueueFullError, match="got 2 waiting"):
            engine.submit([4], greedy(50))
        with pytest.raises(QueueFullError):
            engine.generate([4], greedy(2))
        handles[1].cancel()
        drafter.go.set()
        assert len(handles[2].result(60).token_ids) == 50
        assert len(engine.submit([4], greedy(50)).result(60).token_ids) == 50


def test_a_thread_is_told_once_of_whatever_is_new(counter: Path) -> None:
    """Whoever never idles would otherwise be left with a note for each submission."""
    with Engine(counter, **SMALL) as engine:
        long = engine.submit([1], greedy(200))
        for one in range(40):
            engine.submit([one + 2], greedy(2)).result(60)
        assert engine._scheduler._wake.qsize() <= 1
        assert len(long.result(60).token_ids) == 200


def test_smaller_priorities_come_first_and_nobody_starves(counter: Path) -> None:
    drafter = Paced(0)
    order: list[int] = []
    options = {**SMALL, "max_batch_size": 1}
    with Engine(counter, drafter, max_model_len=64, **options) as engine:

        class Notes(specrt.observer.Observer):
            def admitted(self, request: Any) -> None:
                order.append(request.prompt[0])

        engine._scheduler.observer = Notes()
        drafter.go.clear()
        first = engine.submit([200], greedy(3))
        assert drafter.asked.wait(60)
        handles = [
            engine.submit([one], greedy(2), priority=priority)
            for one, priority in ((1, 5), (2, 5), (3, -1), (4, 0))
        ]
        many = [engine.submit([100], greedy(1)) for _ in range(OVERTAKEN_AT_MOST + 5)]
        drafter.go.set()
        for handle in [first, *handles, *many]:
            handle.result(60)
    assert order[:3] == [200, 3, 4]
    assert order.index(1) == 1 + OVERTAKEN_AT_MOST
    assert order.index(2) == 2 + OVERTAKEN_AT_MOST
    assert order[-1] == 100


# The end.


def test_close_delivers_what_there_is(counter: Path) -> None:
    engine = Engine(counter, Paced(), max_model_len=3000, **{**SMALL, "max_batch_size": 2})
    handles = [engine.submit([one], greedy(2500)) for one in range(4)]
    thread = engine._scheduler._thread
    assert thread is not None
    next(handles[0])
    engine.close()
    assert not thread.is_alive()
    for handle in handles:
        tokens: list[int] = []
        with pytest.raises(SpecrtError, match="closed"):
            collect(handle, tokens)
        assert handle.done
        with pytest.raises(SpecrtError, match="closed"):
            handle.result()
        request = handle._requests[0]
        whole = request.transcript.tokens
        assert whole[len(whole) - len(tokens) :] == tokens
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.submit([1])
    engine.close()


def test_close_while_threads_wait(counter: Path) -> None:
    engine = Engine(counter, Paced(), max_model_len=3000, **SMALL)
    errors: list[BaseException] = []

    def work(wait: Any) -> None:
        try:
            wait()
        except SpecrtError as error:
            errors.append(error)

    handle = engine.submit([1], greedy(2500))
    calls = [
        handle.result,
        lambda: list(handle),
        lambda: engine.generate([3], greedy(2500)),
        lambda: list(engine.stream([3], greedy(2500))),
    ]
    threads = [threading.Thread(target=work, args=(one,)) for one in calls]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine._scheduler._running) == 3)
    engine.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == 4
    assert all("closed" in str(one) for one in errors)


def test_an_engine_let_go_of_ends_its_thread(counter: Path) -> None:
    engine = Engine(counter, max_model_len=64, **SMALL)
    assert engine.submit([1], greedy(3)).result(60).token_ids == [2, 3, 4]
    thread = engine._scheduler._thread
    assert thread is not None
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_leaving_the_interpreter_while_requests_run(counter: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, specrt\n"
        "engine = specrt.Engine(sys.argv[1], 'ngram', max_model_len=4000, threads=2)\n"
        "params = specrt.SamplingParams(max_tokens=3900, ignore_eos=True)\n"
        "handles = [engine.submit([one], params) for one in range(8)]\n"
        "print(next(handles[0]).token_ids)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(counter)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1]\n"
    assert done.stderr == ""
