"""Where an output ends: end tokens, stop tokens, stop texts, max_tokens and the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import Counting, Oracle, assert_identities, assert_same, fingerprint, greedy, known

import specrt
from specrt import DraftTree, Engine, InvalidArgumentError, RequestOutput, SamplingParams
from specrt.drafters import DraftModel, NGram

GAMMA = 6


def count_on(last: int, count: int) -> list[int]:
    """What a counter says after `last`."""
    return [(last + 1 + i) % 256 for i in range(count)]


@pytest.fixture(scope="module")
def plain(counter: Path) -> Iterator[Engine]:
    with Engine(counter, max_model_len=512, threads=1, max_batch_size=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def fast(counter: Path) -> Iterator[Engine]:
    """With an oracle: a round is seven tokens, of which six were drafted."""
    options: dict[str, Any] = {"num_speculative_tokens": GAMMA, "check_invariants": True}
    with Engine(
        counter, Counting(), max_model_len=512, threads=1, max_batch_size=16, **options
    ) as engine:
        yield engine


def both(plain: Engine, fast: Engine, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The output, the same from both engines, streamed or not, and the engines as before."""
    free = fast._decoder.free_kv_tokens
    expected, output = plain.generate(prompt, params), fast.generate(prompt, params)
    assert_same([output], [expected], (prompt, params))
    assert_identities(expected)
    assert_identities(output)
    for engine in (plain, fast):
        text, ids, result = drain(engine.stream(prompt, params))
        assert (text, ids) == (output.text, output.token_ids)
        assert fingerprint(result) == fingerprint(output)
    assert fast._decoder.free_kv_tokens == free
    return output


def drain(stream: Any) -> tuple[str, list[int], RequestOutput]:
    """Everything a stream yields, joined, and what it returns."""
    text, ids = "", []
    while True:
        try:
            one = next(stream)
        except StopIteration as end:
            return text, ids, end.value
        text += one.text
        ids += one.token_ids


# End tokens.


@pytest.mark.parametrize("eos", [100, [100], [7, 100, 180]])
def test_eos_at_each_place_of_a_round(
    eos: Any, make_bigram: Callable[..., Path], tmp_path: Path
) -> None:
    table = np.zeros((256, 256), np.float32)
    table[np.arange(256), (np.arange(256) + 1) % 256] = 40.0
    model = make_bigram(table, eos_token_id=eos)
    ends = [eos] if isinstance(eos, int) else eos
    for drafter in (None, Counting(), NGram(prompt_lookup_min=1), DraftModel(model=model)):
        gamma = None if drafter is None else GAMMA
        with Engine(
            model,
            drafter,
            max_model_len=600,
            threads=1,
            max_batch_size=16,
            num_speculative_tokens=gamma,
        ) as engine:
            for end in ends:
                lengths = range(1, 17)
                prompts = [[(end - length) % 256] for length in lengths]
                for length, output in zip(
                    lengths, engine.generate(prompts, greedy(40)), strict=True
                ):
                    assert output.token_ids == count_on((end - length) % 256, length)
                    assert output.finish_reason == "stop"
                    assert output.stop_reason is None
                    assert_identities(output)
            over = engine.generate([ends[0] - 3], greedy(20, ignore_eos=True))
            assert over.token_ids == count_on(ends[0] - 3, 20)
            assert over.finish_reason == "length"


def test_no_eos_in_the_model(counter: Path) -> None:
    # A cycle in the prompt, so that there is a match at once.
    prompt = [*range(256), 0]
    with Engine(counter, "ngram", max_model_len=1024, threads=1, max_batch_size=1) as engine:
        output = engine.generate(prompt, greedy(300))
    assert output.token_ids == count_on(0, 300)
    assert output.metrics.acceptance_rate == 1.0


def test_stop_tokens(plain: Engine, fast: Engine) -> None:
    for length in range(1, 2 * GAMMA + 4):
        output = both(plain, fast, [60], greedy(40, stop_token_ids=[60 + length, 200]))
        assert output.token_ids == count_on(60, length)
        assert output.finish_reason == "stop"
        assert output.stop_reason == 60 + length
        assert output.text == "".join(map(chr, range(61, 60 + length)))
        kept = both(
            plain,
            fast,
            [60],
            greedy(40, stop_token_ids=[60 + length], include_stop_str_in_output=True),
        )
        assert kept.text == output.text + chr(60 + length)


def test_stop_token_that_the_drafter_proposes_and_the_target_refuses(
    make_bigram: Callable[..., Path],
) -> None:
    table = np.zeros((256, 256), np.float32)
    table[np.arange(256), (np.arange(256) + 1) % 100] = 40.0
    model = make_bigram(table, eos_token_id=200)

    class Ends(specrt.Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            return DraftTree.chain([200] * budget)

    with Engine(model, Ends(), max_model_len=256, threads=1, max_batch_size=1) as engine:
        output = engine.generate([5], greedy(100))
    assert output.token_ids == [(6 + i) % 100 for i in range(100)]
    assert output.metrics.accepted_tokens == 0
    assert output.metrics.drafted_tokens > 0


# Stop texts.


def test_stop_text_at_each_place_of_a_round(plain: Engine, fast: Engine) -> None:
    for before in range(2 * GAMMA + 4):
        last = ord("b") - before  # so that many characters come before "cd"
        output = both(plain, fast, [last], greedy(60, stop="cd"))
        assert output.text == "".join(map(chr, count_on(last, before)))
        assert output.token_ids == count_on(last, before + 2)
        assert output.finish_reason == "stop"
        assert output.stop_reason == "cd"
        kept = both(plain, fast, [last], greedy(60, stop="cd", include_stop_str_in_output=True))
        assert kept.text == output.text + "cd"
        assert kept.token_ids == output.token_ids


@pytest.mark.parametrize("size", [1, 2, 3, GAMMA, GAMMA + 1, 3 * GAMMA])
def test_stop_text_of_any_length(plain: Engine, fast: Engine, size: int) -> None:
    for start in range(70, 70 + GAMMA + 2):
        stop = "".join(map(chr, range(start, start + size)))
        output = both(plain, fast, [64], greedy(60, stop=stop))
        assert output.text == "".join(map(chr, range(65, start)))
        assert output.token_ids == count_on(64, start + size - 65)


def test_several_stop_texts(plain: Engine, fast: Engine) -> None:
    # The one that is complete first ends the output, whichever begins first.
    output = both(plain, fast, [64], greedy(60, stop=["never", "FGHIJK", "HI", "J"]))
    assert (output.text, output.stop_reason) == ("ABCDEFG", "HI")
    # A beginning that comes to nothing is not lost, nor is one that length cuts.
    output = both(plain, fast, [64], greedy(10, stop=["CDEx", "JK"]))
    assert (output.text, output.finish_reason) == ("ABCDEFGHIJ", "length")
    assert output.stop_reason is None


def test_stop_text_in_an_emoji(make_bigram: Callable[..., Path]) -> None:
    text = "a😀bé."
    model = make_bigram(cycle(text.encode()))
    with (
        Engine(model, max_model_len=128, threads=1, max_batch_size=1) as plain,
        Engine(
            model,
            Oracle([(text * 9).encode()], 256),
            num_speculative_tokens=GAMMA,
            max_model_len=128,
            threads=1,
            max_batch_size=1,
        ) as fast,
    ):
        prompt = [ord("a")]
        assert both(plain, fast, prompt, greedy(60, stop="😀")).text == ""
        assert both(plain, fast, prompt, greedy(60, stop="é")).text == "😀b"
        assert both(plain, fast, prompt, greedy(60, stop=".a")).text == "😀bé"
        assert both(plain, fast, prompt, greedy(60, stop=["x😀", ".a😀b"])).text == "😀bé"
        # Cut in the middle of a character: what is left of it is one replacement character.
        for count in range(1, 20):
            output = both(plain, fast, prompt, greedy(count, stop="never"))
            assert output.text == plain.tokenizer.decode(output.token_ids)
        # A replacement character can itself be a stop text.
        output = both(plain, fast, prompt, greedy(2, stop="\ufffd"))
        assert (output.text, output.finish_reason) == ("", "stop")


def cycle(text: bytes) -> np.ndarray:
    """A bigram table that says a text of distinct bytes over and over."""
    assert len(set(text)) == len(text)
    table = np.zeros((256, 256), np.float32)
    for one, following in zip(text, text[1:] + text[:1], strict=True):
        table[one, following] = 40.0
    return table


def test_stop_texts_of_random_outputs(l2: Path) -> None:
    tokenizer = specrt.Tokenizer.from_pretrained(l2)
    params = {"max_tokens": 60, "temperature": 1.2, "skip_special_tokens": False}
    draw = np.random.default_rng(0)
    with Engine(l2, max_model_len=128, threads=1, max_batch_size=8) as plain:
        free = plain.generate([[i] for i in range(40)], SamplingParams(seed=9, **params))
        oracle = Oracle(known(free), 264)
        with Engine(
            l2, oracle, num_speculative_tokens=9, max_model_len=128, threads=1, max_batch_size=8
        ) as fast:
            for output in free:
                assert len(output.text) > 20
                starts = draw.integers(0, len(output.text) - 4, 3)
                sizes = draw.integers(1, 4, 3)
                stops = [output.text[a : a + n] for a, n in zip(starts, sizes, strict=True)]
                stopped = both(
                    plain,
                    fast,
                    output.prompt_token_ids,
                    SamplingParams(seed=9, stop=stops, **params),
                )
                text, count = expected_stop(tokenizer, output.token_ids, stops)
                assert stopped.text == text
                assert stopped.token_ids == output.token_ids[:count]


def expected_stop(tokenizer: specrt.Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, int]:
    """Text and number of tokens up to the first token that completes a stop text."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    text = ""
    for count, token in enumerate([*ids, None], 1):
        text += detokenizer.flush() if token is None else detokenizer.feed(token)
        places = [text.find(one) for one in stops if one in text]
        if places:
            return text[: min(places)], min(count, len(ids))
    return text, len(ids)


def test_special_tokens_in_the_text(l2: Path) -> None:
    params = {"max_tokens": 200, "temperature": 3.0, "seed": 2, "ignore_eos": True}
    with Engine(l2, max_model_len=256, threads=1, max_batch_size=1) as engine:
        shown = engine.generate([1], SamplingParams(skip_special_tokens=False, **params))
        hidden = engine.generate([1], SamplingParams(**params))
        decode = engine.tokenizer.decode
    assert shown.token_ids == hidden.token_ids
    assert any(256 <= one < 260 for one in shown.token_ids)
    assert shown.text == decode(shown.token_ids, skip_special_tokens=False)
    assert hidden.text == decode(shown.token_ids)
    assert "<|" in shown.text
    assert "<|" not in hidden.text


# Length.


@pytest.mark.parametrize("count", [0, 1, 2, 3, GAMMA - 1, GAMMA, GAMMA + 1, GAMMA + 2, 20])
def test_max_tokens(plain: Engine, fast: Engine, count: int) -> None:
    output = both(plain, fast, [9, 10], greedy(count, logprobs=1))
    assert output.token_ids == count_on(10, count)
    assert output.finish_reason == "length"
    metrics = fast.generate([9, 10], greedy(count)).metrics
    # Drafts beyond what is left were cut, so all that counts as drafted was accepted.
    assert metrics.drafted_tokens == metrics.accepted_tokens
    assert metrics.rounds == max(0, -(-(count - 1) // (GAMMA + 1)))


def test_drafter_is_not_asked_for_more_than_can_be_used(counter: Path) -> None:
    drafted: list[int] = []

    class Counted(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            drafted.append(len(tokens))
            return super().propose(tokens, budget)

    options: dict[str, Any] = {"max_model_len": 64, "max_batch_size": 1, "threads": 1}
    with Engine(counter, Counted(), num_speculative_tokens=8, **options) as engine:
        assert engine.generate([1], greedy(1)).metrics.drafted_tokens == 0
        # One more token needs no draft: the target's own is enough.
        assert engine.generate([1], greedy(2)).metrics.drafted_tokens == 0
        assert drafted == []
        assert engine.generate([1], greedy(4)).metrics.drafted_tokens == 2
        assert drafted == [2]


@pytest.mark.parametrize("by_text", [False, True])
def test_stop_and_length_in_one_round(plain: Engine, fast: Engine, by_text: bool) -> None:
    def run(stop_at: int, count: int) -> RequestOutput:
        token = 64 + stop_at
        stop: dict[str, Any] = {"stop": chr(token)} if by_text else {"stop_token_ids": [token]}
        return both(plain, fast, [64], greedy(count, **stop))

    for count in (2, 5, 8, 9, 12):
        for stop_at in range(1, count + 4):
            output = run(stop_at, count)
            assert output.token_ids == count_on(64, min(stop_at, count))
            assert output.finish_reason == ("stop" if stop_at <= count else "length")


def test_stop_text_before_an_end_token_of_the_same_round(plain: Engine, fast: Engine) -> None:
    for stop_at in range(1, 12):
        for end_at in range(stop_at, stop_at + 4):
            params = greedy(40, stop=chr(64 + stop_at), stop_token_ids=[64 + end_at])
            output = both(plain, fast, [64], params)
            assert output.token_ids == count_on(64, stop_at)
            assert output.finish_reason == "stop"
            # The stop token's own text is no part of the output, so no stop text is in it.
            assert output.stop_reason == (chr(64 + stop_at) if end_at > stop_at else 64 + end_at)
            assert output.text == "".join(map(chr, range(65, 64 + stop_at)))


# The context.


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "self", "python", "tree"])
@pytest.mark.parametrize("native", [False, True])
def test_context_edge(tmp_path: Path, drafter: str, native: bool) -> None:
    limit = 32
    model = tiny.tiny_llama(tmp_path / "l2", max_positions=limit if native else 128)
    small = tiny.tiny_llama(tmp_path / "small", hidden=32, heads=2, kv_heads=1, max_positions=20)

    class Tree(specrt.Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            # A chain far beyond any limit, with siblings.
            parents = [-1 if i < 2 else i - 2 for i in range(80)]
            return DraftTree([(tokens[-1] + i) % 128 for i in range(80)], parents)

    given: Any = {
        "none": None,
        "ngram": NGram(prompt_lookup_min=1),
        "model": DraftModel(model=small),
        "self": DraftModel(model=model),
        "python": Counting(vocab=128),
        "tree": Tree(),
    }[drafter]
    options: dict[str, Any] = {"max_model_len": limit, "max_batch_size": 8, "threads": 1}
    prompts = [[(3 * i) % 128 for i in range(length)] for length in range(26, 32)]
    with Engine(model, **options) as plain:
        expected = plain.generate(prompts, greedy(100, ignore_eos=True))
    with Engine(model, given, check_invariants=True, **options) as engine:
        outputs = engine.generate(prompts, greedy(100, ignore_eos=True))
        assert_same(outputs, expected, drafter)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(prompt) + len(output.token_ids) == limit
            assert output.finish_reason == "length"
            assert_identities(output)
        for length in (limit, limit + 1, 1000):
            with pytest.raises(InvalidArgumentError, match=rf"\[prompt\].*{limit}.*{length}"):
                engine.generate([1] * length)


# Short prompts.


def test_prompts_of_no_one_and_two_tokens(counter: Path, plain: Engine) -> None:
    for empty in ("", [[]], [[1], []], ["a", ""]):
        with pytest.raises(InvalidArgumentError, match=r"\[prompt\] expected at least one token"):
            plain.generate(empty)
    drafts: list[Any] = [None, "ngram", NGram(prompt_lookup_min=1), DraftModel(model=counter)]
    for drafter in [*drafts, Counting()]:
        with Engine(counter, drafter, max_model_len=64, threads=1, max_batch_size=2) as engine:
            one, two = engine.generate([[65], [3, 65]], greedy(4))
            assert one.token_ids == two.token_ids == [66, 67, 68, 69]
            assert engine.generate("@", greedy(4)).text == "ABCD"
