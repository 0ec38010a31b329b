"""Calls that come while a round is under way: from drafters, grammars, and the collector."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from helpers import assert_same, greedy

from specrt import (
    Drafter,
    DraftTree,
    Engine,
    SamplingParams,
    SpecrtError,
    StructuredOutputs,
)
from specrt.delivery import Delivery
from specrt.structured import GrammarState

SMALL = {"max_batch_size": 8, "max_num_batched_tokens": 128, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.byte_tokenizer(tiny.tiny_llama(tmp_path_factory.mktemp("model"), vocab=260))


class Calls(Drafter):
    """Calls back once, from inside propose."""

    def __init__(self) -> None:
        self.call: Callable[[], object] | None = None

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        call, self.call = self.call, None
        if call is not None:
            call()
        return DraftTree.chain(tokens[-3:][:budget])


def test_generate_and_close_from_a_drafter_are_refused(model: Path) -> None:
    params = [greedy(30, ignore_eos=True) for _ in range(3)]
    prompts = [[1, 2], [3], [4, 5, 6]]
    with Engine(model, **SMALL) as engine:
        expected = engine.generate(prompts, params)
    drafter = Calls()
    with Engine(model, drafter, **SMALL) as engine:
        for call in (lambda: engine.generate([9, 8], greedy(5)), engine.close):
            drafter.call = call
            with pytest.raises(SpecrtError, match="from inside a drafter") as caught:
                engine.generate(prompts, params)
            done = [one for one in caught.value.outputs if one is not None]
            assert len(done) == 2
            assert_same(engine.generate(prompts, params), expected, "afterwards")
        stream = engine.stream([7], greedy(30, ignore_eos=True))
        next(stream)
        drafter.call = stream.close
        assert_same(engine.generate(prompts, params), expected, "a stream closed inside")
        assert engine._decoder.idle


def test_an_abandoned_stream_costs_its_neighbours_nothing(model: Path) -> None:
    class Holder:
        """Holds a stream in a reference cycle, so that only the collector closes it."""

        def __init__(self, engine: Engine) -> None:
            self.me = self
            self.stream = engine.stream([1, 2, 3], greedy(400, ignore_eos=True))
            next(self.stream)

    first = SamplingParams(max_tokens=40, logprobs=20, seed=1, ignore_eos=True)
    second = SamplingParams(max_tokens=120, temperature=1.0, seed=3, ignore_eos=True)
    with Engine(model, "ngram", **SMALL) as engine:
        expected = [engine.generate([4, 5], first), engine.generate([7, 8], second)]
        threshold = gc.get_threshold()
        gc.set_threshold(10)
        try:
            for _ in range(10):
                one, other = engine.stream([4, 5], first), engine.stream([7, 8], second)
                next(one)
                Holder(engine)
                next(other)
                outputs = []
                for stream in (one, other):
                    try:
                        while True:
                            next(stream)
                    except StopIteration as end:
                        outputs.append(end.value)
                assert_same(outputs, expected, "beside an abandoned stream")
        finally:
            gc.set_threshold(*threshold)


def test_streams_lose_nothing_between_threads(model: Path) -> None:
    params = greedy(25, ignore_eos=True)
    prompts = [[one, one + 1] for one in range(1, 7)]
    wrong: list[object] = []
    with Engine(model, "ngram", **SMALL) as engine:
        expected = [one.text for one in engine.generate(prompts, params)]

        def work(index: int) -> None:
            for _ in range(15):
                stream = engine.stream(prompts[index], params)
                pieces: list[str] = []
                try:
                    while True:
                        pieces.append(next(stream).text)
                except StopIteration as end:
                    if "".join(pieces) != expected[index] or end.value.text != expected[index]:
                        wrong.append((index, pieces))

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=work, args=(one,)) for one in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
        finally:
            sys.setswitchinterval(interval)
    assert wrong == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_distributions_that_are_none_are_refused(
    model: Path, verification: str, value: float
) -> None:
    class Lies(Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            tree = DraftTree([250], [-1])
            tree.set_distribution(-1, [value] * 260)
            return tree

    params = SamplingParams(
        max_tokens=8, temperature=1.5, seed=1, allowed_token_ids=[10, 11, 12], ignore_eos=True
    )
    with Engine(model, Lies(), verification=verification, **SMALL) as engine:
        with pytest.raises(SpecrtError, match="distribution"):
            engine.generate([1, 2, 3], params)
        assert engine._decoder.idle


def test_a_draft_that_its_law_cannot_give_is_refused(model: Path) -> None:
    class Lies(Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            tree = DraftTree([11], [-1])
            tree.set_distribution(-1, [0.0] * 10 + [1.0] + [0.0] * 249)
            return tree

    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, ignore_eos=True)
    with (
        Engine(model, Lies(), verification="rejection", **SMALL) as engine,
        pytest.raises(SpecrtError, match="tokens that their distribution can give"),
    ):
        engine.generate([1, 2, 3], params)


def test_ctrl_c_in_a_drafter_stops_the_call(model: Path) -> None:
    class Interrupted(Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            raise KeyboardInterrupt

    with Engine(model, Interrupted(), **SMALL) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([1, 2, 3], greedy(8, ignore_eos=True))
        assert engine._decoder is not None


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_grammar_that_fails_on_a_draft_ends_its_own_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    model = tiny.byte_tokenizer(tiny.tiny_llama(tmp_path, vocab=264, eos_token_id=257))
    grammar = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-z]+"))
    with Engine(model, **SMALL) as engine:
        expected = engine.generate([[3, 4]], greedy(40, ignore_eos=True))

    class Letters(Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            return DraftTree.chain([97] * budget)

    def fail(self: GrammarState, tokens: list[int]) -> int:
        raise kind("boom")

    with Engine(model, Letters(), **SMALL) as engine:
        stream = engine.stream([3, 4], greedy(40, ignore_eos=True))
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(GrammarState, "accepts", fail)
            with pytest.raises((SpecrtError, KeyboardInterrupt)) as caught:
                engine.generate([1, 2], grammar)
        if kind is MemoryError:
            assert "boom" in str(caught.value)
        else:
            # The round's results went with it: whoever was in it would have a gap.
            assert isinstance(caught.value, KeyboardInterrupt)
            with pytest.raises(SpecrtError, match="a round was lost"):
                list(stream)
        list(stream)
        again = engine.generate([[3, 4]], greedy(40, ignore_eos=True))
        assert_same(again, expected, "afterwards")
        assert engine._decoder.idle


def test_an_interrupt_before_admission_loses_nobody(model: Path) -> None:
    with Engine(model, **SMALL) as engine:
        decoder = engine._decoder

        class Interrupted:
            armed = True

            def __getattr__(self, name: str) -> object:
                return getattr(decoder, name)

            def can_add(self, *sizes: int) -> bool:
                if self.armed:
                    self.armed = False
                    raise KeyboardInterrupt
                return decoder.can_add(*sizes)

        scheduler = engine._scheduler
        waiting = engine._requests([[5, 6]], [greedy(5, ignore_eos=True)])[0]
        delivery = Delivery(1)
        scheduler.submit(waiting, delivery)
        scheduler.decoder = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            engine.generate([1, 2], greedy(3))
        scheduler.decoder = decoder
        engine.generate([1, 2], greedy(9, ignore_eos=True))
        assert delivery.over
        assert all(one.finish_reason == "length" for one in waiting)
