"""What clumsy and hostile callers do to a running engine: nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Counting, greedy

from specrt import (
    CapacityError,
    Engine,
    InvalidArgumentError,
    SamplingParams,
    SpecrtError,
    StructuredOutputs,
    _core,
)

SMALL: dict[str, Any] = {
    **{"max_model_len": 128, "max_batch_size": 4, "max_num_batched_tokens": 64, "threads": 1},
    "check_invariants": True,
}


@pytest.fixture
def engine(l2: Path) -> Iterator[Engine]:
    with Engine(l2, "ngram", **SMALL) as engine:
        free = engine._scheduler.open_decoder().free_kv_tokens
        yield engine
        end = time.monotonic() + 60
        while not engine._scheduler.open_decoder().idle:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert engine._scheduler.open_decoder().free_kv_tokens == free


# --- forks --------------------------------------------------------------------------------------


def in_a_fork(what: Callable[[], bool], seconds: float = 20) -> None:
    """Whether it comes to an end there, and is true."""
    process = os.fork()
    if process == 0:
        fine = False
        try:
            fine = what()
        finally:
            os._exit(0 if fine else 1)
    end = time.monotonic() + seconds
    while True:
        gone, status = os.waitpid(process, os.WNOHANG)
        if gone:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            pytest.fail("the forked process hangs")
        time.sleep(0.005)


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except InvalidArgumentError as error:
        return "after forking" in str(error)
    return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's own, of forks beside threads
@pytest.mark.parametrize("in_background", [False, True])
def test_a_fork_is_refused_at_once(l2: Path, in_background: bool) -> None:
    with Engine(l2, "ngram", **{**SMALL, "threads": 2}) as engine:
        expected = engine.generate([1, 2], greedy(60)).token_ids
        handle = engine.submit([1, 2], greedy(60)) if in_background else None

        async def wait(one: Any) -> None:
            await one

        def child() -> bool:
            fine = refused(lambda: engine.generate([1, 2], greedy(4)))
            fine &= refused(lambda: engine.submit([1, 2]))
            fine &= refused(lambda: next(engine.stream([1, 2])))
            fine &= refused(engine.metrics)
            if handle is not None and not handle.done:
                fine &= refused(handle.result)
                fine &= refused(lambda: next(handle))
                fine &= refused(lambda: asyncio.run(wait(handle)))
                handle.cancel()
            engine.close()  # its parent's: nothing is to be done
            return fine

        with engine._scheduler.between_rounds():  # whoever holds the lock is not there either
            in_a_fork(child)
        in_a_fork(child)
        if handle is not None:
            assert handle.result(60).token_ids == expected
        assert engine.generate([1, 2], greedy(60)).token_ids == expected


# --- what the system refuses --------------------------------------------------------------------


def test_no_thread_to_run_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(CapacityError, match="thread"):
            engine.submit([1, 2], greedy(8))
    expected = engine.generate([1, 2], greedy(8)).token_ids
    assert engine.submit([1, 2], greedy(8)).result(60).token_ids == expected


# --- exceptions at bad moments ------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_results_are_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Of two requests that finish in one round the first meets it; the other has its output, and
    nobody waits for ever."""
    from specrt.request import Request

    expected = engine.generate([3, 4], greedy(1)).token_ids
    feed = Request.feed
    outputs: list[Any] = []

    def interrupted(self: Request, *rest: Any) -> int:
        if self.prompt == [1, 2]:
            raise error
        return feed(self, *rest)

    def other() -> None:
        outputs.append(engine.generate([3, 4], greedy(1)))

    with monkeypatch.context() as patched:
        patched.setattr(Request, "feed", interrupted)
        with engine._scheduler.lock:  # so that both are in one round
            thread = threading.Thread(target=other)
            thread.start()
            while engine._scheduler.load[0] < 1:
                time.sleep(0.001)
            with pytest.raises(error):
                engine.generate([1, 2], greedy(1))
    thread.join(60)
    assert not thread.is_alive()
    assert outputs[0].token_ids == expected
    assert engine.generate([3, 4], greedy(1)).token_ids == expected


def test_leaving_between_a_round_and_its_results(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core has ended the request already when it is withdrawn."""
    scheduler = engine._scheduler
    deliver = scheduler._deliver_results

    def interrupted(decoder: _core.Decoder) -> None:
        monkeypatch.setattr(scheduler, "_deliver_results", deliver)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "_deliver_results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2], greedy(1))
    assert not scheduler._left
    assert engine.generate([1, 2], greedy(3)).token_ids


def test_a_request_that_cannot_be_let_in_harms_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine._scheduler._add

    def failing(decoder: _core.Decoder, request: Any) -> int:
        if request.prompt == [1, 2]:
            raise RuntimeError("out of something")
        return add(decoder, request)

    expected = engine.generate([3, 4], greedy(8)).token_ids
    monkeypatch.setattr(engine._scheduler, "_add", failing)
    for background in (False, True):
        if background:
            handles = [engine.submit(one, greedy(8)) for one in ([1, 2], [3, 4])]
            with pytest.raises(SpecrtError, match="out of something"):
                handles[0].result(60)
            assert handles[1].result(60).token_ids == expected
            continue
        with pytest.raises(SpecrtError, match="out of something") as caught:
            engine.generate([[1, 2], [3, 4]], greedy(8))
        assert caught.value.outputs[0] is None  # type: ignore[attr-defined]
        assert caught.value.outputs[1].token_ids == expected  # type: ignore[attr-defined]


def test_a_tokenizer_that_fails_while_a_request_is_withdrawn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrt.text.detokenizer import Detokenizer

    def flush(self: Any) -> str:
        raise ValueError("no such byte")

    for params in (greedy(100), greedy(100, stop="never", logprobs=1)):
        with monkeypatch.context() as patched:
            with engine._scheduler.lock:  # one round at most comes before the end
                patched.setattr(Detokenizer, "flush", flush)
                handle = engine.submit([1, 2], params)
                handle.cancel()
            with pytest.raises(SpecrtError, match="no such byte"):
                handle.result(60)
        assert engine.generate([1, 2], greedy(3)).token_ids


def test_a_tokenizer_that_fails_while_text_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the request whose text it is, and whoever waits for that is told why."""
    from specrt.text.detokenizer import Detokenizer

    expected = engine.generate([3, 4], greedy(8))
    feed = Detokenizer.feed
    bad = engine.generate([1, 2], greedy(8)).token_ids[0]
    assert bad not in expected.token_ids

    def failing(self: Any, token: int) -> str:
        if token == bad:
            raise ValueError("no such token")
        return feed(self, token)

    monkeypatch.setattr(Detokenizer, "feed", failing)
    with pytest.raises(SpecrtError, match="no such token") as caught:
        engine.generate([[3, 4], [1, 2]], greedy(8))
    good, none = caught.value.outputs  # type: ignore[attr-defined]
    assert none is None
    assert good.text == expected.text
    for read in (list, lambda handle: handle.result(60)):
        with pytest.raises(SpecrtError, match="no such token"):
            read(engine.submit([1, 2], greedy(8)))
    with pytest.raises(SpecrtError, match="no such token"):
        list(engine.stream([1, 2], greedy(8)))
    endless = engine.submit([1, 2], greedy(120, ignore_eos=True, n=2))
    with pytest.raises(SpecrtError, match="no such token"):
        list(endless)
    with pytest.raises(SpecrtError, match="no such token"):
        endless.result(60)
    assert engine.submit([3, 4], greedy(8)).result(60).text == expected.text


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}])
def test_an_interrupt_while_text_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Whoever reads after it has the whole text all the same."""
    from specrt.text import Tokenizer
    from specrt.text.detokenizer import Detokenizer

    expected = engine.generate([1, 2], greedy(30, **options))
    parts = ((Detokenizer, "feed"), (Tokenizer, "token_text"))
    for which, name in parts if options else parts[:1]:
        done = getattr(which, name)
        for moment in (1, 2, 7, 20):
            handle = engine.submit([1, 2], greedy(30, **options))
            moments = iter(range(1, 1000))

            def interrupted(*rest: Any, **how: Any) -> Any:
                if next(moments) == moment:  # noqa: B023
                    raise KeyboardInterrupt
                return done(*rest, **how)  # noqa: B023

            with monkeypatch.context() as patched:
                patched.setattr(which, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    list(handle)
                output = handle.result(60)
            assert output.text == expected.text
            assert output.token_ids == expected.token_ids
            assert output.logprobs == expected.logprobs


def test_increments_after_an_interrupt_miss_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they tell anything twice; the last one says how it ended."""
    from specrt.text.detokenizer import Detokenizer

    expected = engine.generate([1, 2], greedy(12))
    for name in ("feed", "flush"):
        done = getattr(Detokenizer, name)
        calls = iter(range(1000))

        def interrupted(*rest: Any) -> Any:
            if next(calls) in (0, 5, 6):  # noqa: B023
                raise KeyboardInterrupt
            return done(*rest)  # noqa: B023

        handle = engine.submit([1, 2], greedy(12))
        increments: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(Detokenizer, name, interrupted)
            while True:
                try:
                    for one in handle:
                        increments.append(one)
                    break
                except KeyboardInterrupt:
                    continue
        assert [token for one in increments for token in one.token_ids] == expected.token_ids
        assert [one.finish_reason for one in increments if one.finish_reason] == ["length"]
        assert "".join(one.text for one in increments) == expected.text


def test_a_lost_round_wakes_those_who_await(l2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(handle: Any) -> None:
        async for _ in handle:
            pass

    async def work(engine: Engine) -> list[Any]:
        handles = [engine.submit([row], greedy(200)) for row in range(3)]
        await handles[2].__anext__()
        scheduler = engine._scheduler

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(decoder, name)

            def policy_round(self, tokens: int) -> None:
                raise RuntimeError("out of luck")

        decoder = scheduler.decoder
        scheduler.decoder = Failing()  # type: ignore[assignment]
        tasks = [read(handles[0]), handles[1], read(handles[2])]
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        scheduler.decoder = decoder
        return told

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Engine(l2, **SMALL) as engine:
            told = asyncio.run(work(engine))
            assert all(isinstance(one, SpecrtError) for one in told), told
            assert engine.generate([1, 2], greedy(3)).token_ids


@pytest.mark.parametrize("stop", [None, "never"])
def test_a_handler_that_cancels_what_its_thread_reads(engine: Engine, stop: str | None) -> None:
    """A signal comes anywhere: while the reader waits, or makes text."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    current: list[Any] = []
    before = signal.signal(signal.SIGALRM, lambda *_: current[0].cancel())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in range(150):
            current[:] = [engine.submit([turn % 60], greedy(150, stop=stop))]
            signal.setitimer(signal.ITIMER_REAL, 0.0003 + turn % 10 * 0.0005, 0.0005)
            reasons = [one.finish_reason for one in current[0]]
            assert [one for one in reasons if one] in (["abort"], ["length"], ["stop"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.setswitchinterval(interval)
    assert engine.generate([1, 2], greedy(3)).token_ids


def test_a_failure_in_the_prompts_logprobs_leaves_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrt.text import Tokenizer

    token_text = Tokenizer.token_text

    def failing(self: Any, token: int) -> str:
        if token == 33:
            raise ValueError("no such token")
        return token_text(self, token)

    monkeypatch.setattr(Tokenizer, "token_text", failing)
    params = greedy(2, prompt_logprobs=0)
    with pytest.raises(SpecrtError, match="no such token") as caught:
        engine.generate([[1, 2], [1, 33], [3, 4]], params)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert [one is None for one in outputs] == [False, True, False]


def test_what_a_reader_does_to_its_increments_is_its_own(engine: Engine) -> None:
    handle = engine.submit([1, 2], greedy(5, logprobs=1))
    for one in handle:
        one.token_ids.clear()
        assert one.logprobs is not None
        one.logprobs.clear()
    output = handle.result(60)
    assert output.logprobs is not None
    assert len(output.token_ids) == len(output.logprobs) == 5


def test_rounds_make_no_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads does, or a round with many readers takes too long."""
    from specrt.text import Tokenizer
    from specrt.text.detokenizer import Detokenizer

    makers: set[str] = set()

    def noted(call: Any) -> Any:
        def noting(*rest: Any, **how: Any) -> Any:
            makers.add(threading.current_thread().name)
            return call(*rest, **how)

        return noting

    monkeypatch.setattr(Detokenizer, "feed", noted(Detokenizer.feed))
    monkeypatch.setattr(Detokenizer, "flush", noted(Detokenizer.flush))
    monkeypatch.setattr(Tokenizer, "decode", noted(Tokenizer.decode))
    here = threading.current_thread().name
    list(engine.submit([1, 2], greedy(20, logprobs=1, prompt_logprobs=1)))
    engine.submit([1, 2], greedy(20)).result(60)
    assert makers == {here}
    engine.submit([1, 2], greedy(20, stop="never")).result(60)
    assert makers == {here, "specrt-rounds"}


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["finished", "queued"])
def test_the_collector_ends_a_stream_while_another_request_is_told_of(
    l2: Path, tmp_path: Path, moment: str
) -> None:
    """At that moment the thread holds the locks that the end of the stream needs, too."""

    class Cycle:
        pass

    class Collecting(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            gc.collect()

    done: list[bool] = []

    def work() -> None:
        with Engine(l2, trace=tmp_path / "t.jsonl", **SMALL) as engine:
            garbage = Cycle()
            garbage.me, garbage.stream = garbage, engine.stream([5, 6], greedy(90))  # type: ignore[attr-defined]
            next(garbage.stream)  # type: ignore[attr-defined]
            handle = engine.submit([1, 2], greedy(90))
            next(handle)
            with engine._scheduler.lock:  # no round comes in between
                if moment == "finished":
                    engine._metrics._finished = Collecting({"abort": 0})  # type: ignore[assignment]
                else:
                    assert engine._trace is not None
                    engine._trace._numbers = Collecting(engine._trace._numbers)
                del garbage
                left = engine._scheduler._left
                extra = engine.submit([3], greedy(1)) if moment == "queued" else None
                handle.cancel()
                assert len(left) >= 1
            handle.result(60)
            assert extra is None or len(extra.result(60).token_ids) == 1
            end = time.monotonic() + 60
            while not engine._scheduler.open_decoder().idle:
                assert time.monotonic() < end
                time.sleep(0.001)
            assert engine.metrics().requests_finished["abort"] == 2
        done.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(90)
    assert done


def test_a_grammar_that_takes_long_holds_up_nobody_else(
    l2_eos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrt.structured import Grammar

    compile_ = Grammar.compile
    compiling, go_on = threading.Event(), threading.Event()

    def slow(self: Any, *rest: Any) -> Any:
        compiling.set()
        assert go_on.wait(60)
        return compile_(self, *rest)

    monkeypatch.setattr(Grammar, "compile", slow)
    outputs: list[Any] = []
    params = greedy(6, structured_outputs=StructuredOutputs(regex="[a-z]*"))
    with Engine(l2_eos, **SMALL) as engine:
        thread = threading.Thread(target=lambda: outputs.append(engine.generate("x", params)))
        thread.start()
        try:
            assert compiling.wait(60)
            assert engine.submit([1, 2], greedy(4)).result(60).token_ids
        finally:
            go_on.set()
            thread.join(60)
    assert outputs[0].token_ids


@pytest.mark.parametrize("priority", [-(10**30), 10**30])
def test_priorities_of_any_size(engine: Engine, priority: int) -> None:
    handle = engine.submit([1, 2], greedy(4), priority=priority)
    assert len(handle.result(60).token_ids) == 4


def test_cancelling_from_many_threads(l2: Path) -> None:
    """Whatever the moment: every handle ends, with its own output or what there was of it."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    with Engine(l2, Counting(vocab=264), **SMALL) as engine:
        expected = engine.generate([5, 6], params).token_ids
        wrong: list[Any] = []

        def client(number: int) -> None:
            for turn in range(6):
                handle = engine.submit([5, 6], params, priority=turn % 3)
                time.sleep(0.0007 * ((number * 7 + turn * 3) % 11))
                if number % 2:
                    threading.Thread(target=handle.cancel).start()
                handle.cancel()
                got = handle.result(60).token_ids
                if got != expected[: len(got)]:
                    wrong.append(got)

        threads = [threading.Thread(target=client, args=(one,)) for one in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(120)
            assert not one.is_alive()
        assert not wrong
        assert engine.metrics().requests_running == 0
        assert engine.metrics().requests_waiting == 0


def test_one_handle_in_several_event_loops(engine: Engine) -> None:
    expected = engine.generate([1, 2], greedy(60)).token_ids
    handle = engine.submit([1, 2], greedy(60))
    seen: list[int] = []
    outputs: list[list[int]] = []

    async def read() -> None:
        async for one in handle:
            seen.extend(one.token_ids)
        outputs.append((await handle).token_ids)

    threads = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert outputs == [expected] * 3
    assert sorted(seen) == sorted(expected)  # each increment once, to one of them
