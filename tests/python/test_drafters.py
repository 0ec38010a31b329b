"""Drafters: what they propose, what they may not do, and how well fixed pairs go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import (
    AlwaysWrong,
    Branching,
    Counting,
    HalfRight,
    Oracle,
    Watched,
    assert_identities,
    assert_same,
    greedy,
    known,
)

from specrt import Drafter, DraftTree, Engine, InvalidArgumentError, SamplingParams, SpecrtError
from specrt.drafters import DraftModel, NGram

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 8, "threads": 1}


# How a drafter is named.


@pytest.mark.parametrize("word", ["n-gram", "Ngram", "ngrams", "eagle", "nothing", ""])
def test_unknown_kind(counter: Path, word: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[drafter\] expected .*'ngram'"):
        Engine(counter, word, **SMALL)


@pytest.mark.parametrize("kind", [NGram, DraftModel, Drafter, Counting])
def test_class_instead_of_object(counter: Path, kind: type) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"got the class {kind.__name__}"):
        Engine(counter, kind, **SMALL)


@pytest.mark.parametrize("thing", [3, True, ["ngram"], {"kind": "ngram"}, object()])
def test_other_things_instead_of_a_drafter(counter: Path, thing: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[drafter\]"):
        Engine(counter, thing, **SMALL)


def test_unknown_keys() -> None:
    for make in (lambda: NGram(max_match=3), lambda: DraftModel(path="x"), lambda: DraftModel()):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(TypeError):  # propose is missing
        Drafter()


def test_ngram_arguments() -> None:
    for name in ("prompt_lookup_min", "prompt_lookup_max", "num_speculative_tokens"):
        for value in (0, -1, 1.5, "2", None, True, 2**63):
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
                NGram(**{name: value})
    with pytest.raises(InvalidArgumentError, match=r"\[prompt_lookup_max\].*5.*3"):
        NGram(prompt_lookup_min=5, prompt_lookup_max=3)
    with pytest.raises(InvalidArgumentError, match=r"\[most_recent\]"):
        NGram(most_recent="yes")


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, 2**63, 10**30])
def test_number_of_draft_tokens(counter: Path, value: Any) -> None:
    name = r"\[num_speculative_tokens\]"
    with pytest.raises(InvalidArgumentError, match=name):
        Engine(counter, "ngram", num_speculative_tokens=value, **SMALL)
    with pytest.raises(InvalidArgumentError, match=name):
        Engine(counter, DraftModel(model=counter, num_speculative_tokens=value), **SMALL)
    drafter = Counting()
    drafter.num_speculative_tokens = value
    with pytest.raises(InvalidArgumentError, match=name):
        Engine(counter, drafter, **SMALL)


def test_a_drafter_that_does_not_say_how_many(counter: Path) -> None:
    drafter = Counting()
    drafter.num_speculative_tokens = None  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match=r"\[num_speculative_tokens\].*got None"):
        Engine(counter, drafter, **SMALL)


def test_number_of_draft_tokens_without_a_drafter(counter: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[num_speculative_tokens\].*drafter"):
        Engine(counter, num_speculative_tokens=3, **SMALL)
    with Engine(counter, num_speculative_tokens=0, **SMALL) as engine:
        assert engine.generate([1], greedy(3)).token_ids == [2, 3, 4]


@pytest.mark.parametrize("gamma", [*range(1, 18), 100, 2**40])
def test_every_number_of_draft_tokens_works(counter: Path, gamma: int) -> None:
    for drafter in (Counting(), DraftModel(model=counter), NGram(prompt_lookup_min=1)):
        with Engine(counter, drafter, num_speculative_tokens=gamma, **SMALL) as engine:
            output = engine.generate([*range(20), 0], greedy(50))
        assert output.token_ids == list(range(1, 51))
        assert output.metrics.drafted_tokens > 0
        at_most = gamma * output.metrics.rounds
        assert output.metrics.drafted_tokens <= at_most


def test_no_draft_tokens_at_all(counter: Path) -> None:
    with pytest.warns(UserWarning, match="Counting drafts nothing unless"):
        engine = Engine(counter, Counting(), num_speculative_tokens=0, **SMALL)
    with engine:
        output = engine.generate([3], greedy(20))
    assert output.token_ids == list(range(4, 24))
    assert output.metrics.drafted_tokens == 0
    assert output.metrics.rounds == 19


def test_default_number_of_draft_tokens(counter: Path) -> None:
    for drafter, number in (
        ("ngram", NGram().num_speculative_tokens),
        (NGram(num_speculative_tokens=3), 3),
        (DraftModel(model=counter, num_speculative_tokens=7), 7),
        (counter, DraftModel(model=counter).num_speculative_tokens),
        (Counting(), Drafter.num_speculative_tokens),
        (None, 0),
    ):
        with Engine(counter, drafter, **SMALL) as engine:
            assert engine.num_speculative_tokens == number


# N-gram lookup. Engines are used where the shapes of the drafts show.


def drafts_of(model: Path, drafter: NGram, prompt: list[int]) -> int:
    """How many tokens of the counter the drafter got right in the first round."""
    with Engine(model, drafter, **SMALL) as engine:
        output = engine.generate(prompt, greedy(drafter.num_speculative_tokens + 2))
    assert output.token_ids[0] == (prompt[-1] + 1) % 256
    return output.metrics.accepted_tokens if output.metrics.rounds == 1 else 0


def test_longest_match_counts(counter: Path) -> None:
    # After 10 11 12 the counter says 13, then 14 15 16. The three-token match leads there; the
    # later one-token match leads elsewhere.
    prompt = [11, 12, 13, 14, 15, 16, 17, 90, 13, 99, 99, 99, 99, 11, 12]
    assert (
        drafts_of(
            counter,
            NGram(prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=3),
            prompt,
        )
        == 3
    )
    assert (
        drafts_of(
            counter,
            NGram(prompt_lookup_min=1, prompt_lookup_max=1, num_speculative_tokens=3),
            prompt,
        )
        == 0
    )
    # Too short a match is none.
    with Engine(counter, NGram(prompt_lookup_min=4, prompt_lookup_max=8), **SMALL) as engine:
        assert engine.generate(prompt, greedy(3)).metrics.drafted_tokens == 0


def test_most_recent_match_counts(counter: Path) -> None:
    right, wrong = [12, 13, 14, 15, 16], [12, 13, 77, 77, 77]
    for prompt, best in (([*right, *wrong, 11, 12], False), ([*wrong, *right, 11, 12], True)):
        for most_recent in (False, True):
            drafter = NGram(most_recent=most_recent, num_speculative_tokens=3)
            accepted = drafts_of(counter, drafter, prompt)
            assert (accepted == 3) == (most_recent == best)


def test_twenty_prompts_with_repetitions(l2: Path) -> None:
    draw = np.random.default_rng(1)
    prompts = []
    for _ in range(20):
        phrase = draw.integers(0, 256, draw.integers(2, 6)).tolist()
        noise = draw.integers(0, 256, 8).tolist()
        prompts.append([*phrase, *noise, *phrase, *noise[:3], *phrase])
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate(prompts, greedy(60))
        assert_same(engine.generate(prompts, greedy(60)), expected, "again")
    for gamma in range(1, 9):
        drafter = NGram(prompt_lookup_min=2, prompt_lookup_max=5)
        with Engine(l2, drafter, num_speculative_tokens=gamma, **SMALL) as engine:
            for _ in range(2):
                assert_same(engine.generate(prompts, greedy(60)), expected, gamma)


def test_marker_that_recurs_with_other_continuations(l2: Path) -> None:
    prompt = [token for i in range(6) for token in (27, 27, 50 + i)] + [27, 27]
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate(prompt, greedy(80))
    for shortest in (2, 8):
        drafter = NGram(prompt_lookup_min=shortest, prompt_lookup_max=8)
        with Engine(l2, drafter, **SMALL) as engine:
            assert_same([engine.generate(prompt, greedy(80))], [expected], shortest)


@pytest.mark.parametrize("history", ["equal", "fibonacci"])
def test_long_repetitive_histories(history: str, make_bigram: Callable[..., Path]) -> None:
    model = make_bigram(np.eye(16, dtype=np.float32) * 40)
    text = [3] * 3000
    if history == "fibonacci":
        one, two = [4], [4, 3]
        while len(two) < 3000:
            one, two = two, two + one
        text = two[:3000]
    drafter = NGram(prompt_lookup_min=1, prompt_lookup_max=64, num_speculative_tokens=16)
    with Engine(model, drafter, max_batch_size=2, threads=1) as engine:
        output = engine.generate([*text, 3, 3], greedy(200))
    assert output.token_ids == [3] * 200
    assert output.metrics.rounds < 40


def test_index_memory_is_told_and_freed(l2: Path) -> None:
    with Engine(l2, "ngram", **SMALL) as engine:
        assert engine.memory.drafter_index == 0
        stream = engine.stream([1, 2, 3] * 20, greedy(40))
        next(stream)
        assert engine.memory.drafter_index > 0
        stream.close()
        assert engine.memory.drafter_index == 0


# Draft models.


def test_self_draft_accepts_everything(l2: Path, qwen2: Path) -> None:
    draw = np.random.default_rng(2)
    prompts = [draw.integers(0, 256, n).tolist() for n in (1, 2, 17, 33, 50, 3, 8, 40)]
    for model in (l2, qwen2):
        for dtype in ("float32", "bfloat16"):
            for gamma in (1, 3, 7):
                draft = DraftModel(model=model, dtype=dtype)
                with Engine(
                    model,
                    draft,
                    dtype=dtype,
                    num_speculative_tokens=gamma,
                    # Chunks smaller than the prompts, in both models.
                    max_num_batched_tokens=16,
                    **SMALL,
                ) as engine:
                    outputs = engine.generate(prompts, greedy(60))
                for output in outputs:
                    assert output.metrics.acceptance_rate == 1.0
                    assert_identities(output)


def test_unrelated_drafters_have_one_answer(l2: Path, l2_other: Path) -> None:
    prompts = [[i, 2 * i, 3 * i] for i in range(6)]
    for dtype in ("float32", "bfloat16"):
        with Engine(l2, dtype=dtype, **SMALL) as engine:
            expected = engine.generate(prompts, greedy(50))
        texts = known(expected)
        for drafter in (
            DraftModel(model=l2, dtype="float32"),
            DraftModel(model=l2, dtype="bfloat16"),
            DraftModel(model=l2_other),
            NGram(prompt_lookup_min=1),
            AlwaysWrong(texts, 264),
        ):
            with Engine(l2, drafter, dtype=dtype, **SMALL) as engine:
                assert_same(engine.generate(prompts, greedy(50)), expected, drafter)


def test_smaller_draft_context(l2: Path, tmp_path: Path) -> None:
    short = tiny.byte_tokenizer(tiny.tiny_llama(tmp_path / "short", vocab=264, max_positions=32))
    prompts = [[5, 6], list(range(40)), list(range(30)), list(range(31)), list(range(32))]
    options = {**SMALL, "max_model_len": 128}
    with Engine(l2, **options) as engine:
        expected = engine.generate(prompts, greedy(80))
    # The draft model has the target's weights, so that its drafts are right while it drafts.
    with Engine(l2, DraftModel(model=short), check_invariants=True, **options) as engine:
        outputs = engine.generate(prompts, greedy(80))
    assert_same(outputs, expected, "short context")
    assert 20 <= outputs[0].metrics.drafted_tokens <= 32
    assert outputs[1].metrics.drafted_tokens == 0  # already longer than the draft model's context
    assert outputs[4].metrics.drafted_tokens == 0
    assert all(one.metrics.accepted_tokens == one.metrics.drafted_tokens for one in outputs)


def test_acceptance_does_not_fade(l2: Path, l2_close: Path) -> None:
    # A draft cache that lags by a token after each rejection would be wrong ever more often.
    options: dict[str, Any] = {"max_model_len": 1100, "max_batch_size": 1, "threads": 1}
    params = SamplingParams(max_tokens=500, temperature=0.8, seed=4, ignore_eos=True)
    with Engine(
        l2, DraftModel(model=l2_close), num_speculative_tokens=3, policy="fixed", **options
    ) as engine:
        first = engine.generate([1, 2, 3], params)
        # The same text goes on; the drafter's cache is filled anew from the prompt.
        text = [*first.prompt_token_ids, *first.token_ids]
        rest = engine.generate(text[:250], SamplingParams(max_tokens=200, temperature=0.8, seed=4))
        whole = engine.generate(text[:3], SamplingParams(max_tokens=447, temperature=0.8, seed=4))
    assert rest.token_ids == text[250:450] == whole.token_ids[-200:]
    assert first.metrics.accepted_tokens > 50
    assert first.metrics.accepted_tokens < first.metrics.drafted_tokens


def test_draft_cache_after_rejections_is_as_fresh(l2: Path, l2_close: Path) -> None:
    # Drafts of a long run, round by round, equal those of fresh requests at the same place.
    params = greedy(40)
    options: dict[str, Any] = {**SMALL, "num_speculative_tokens": 3, "policy": "fixed"}
    with Engine(l2, DraftModel(model=l2_close), **options) as engine:
        run = engine.generate([1, 2, 3], params)
        metrics = run.metrics
        assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
        text = [1, 2, 3, *run.token_ids]
        # Walk the rounds of the long run with requests of one round each.
        at, accepted, rounds = 4, 0, 0
        while at < len(text):
            left = len(text) - at
            once = engine.generate(text[: at - 1], greedy(min(5, left + 1)))
            first_round = first_round_accepts(engine, text, at)
            assert once.token_ids == text[at - 1 : at - 1 + len(once.token_ids)]
            accepted += first_round
            at += first_round + 1
            rounds += 1
    assert (accepted, rounds) == (metrics.accepted_tokens, metrics.rounds)


def first_round_accepts(engine: Engine, text: list[int], at: int) -> int:
    """Drafts accepted in the round that begins with `at` tokens of the text known."""
    stream = engine.stream(text[: at - 1], greedy(len(text) - at + 1))
    first = next(stream)
    assert first.token_ids == [text[at - 1]]
    second = next(stream)
    stream.close()
    return len(second.token_ids) - 1


def test_draft_model_of_another_vocabulary(counter: Path, l2: Path, tmp_path: Path) -> None:
    bigger = tiny.tiny_llama(tmp_path / "bigger", vocab=300)
    smaller = tiny.tiny_llama(tmp_path / "smaller", vocab=128)
    for model, size in ((bigger, 300), (smaller, 128)):  # no tokenizers to compare
        with pytest.raises(InvalidArgumentError, match=rf"\[drafter\].*264.*{size}"):
            Engine(l2, model, **SMALL)


def test_padded_vocabularies_go_together(l2: Path, tmp_path: Path) -> None:
    # 264 and 288 rows for the same 260 tokens.
    padded = tiny.byte_tokenizer(tiny.tiny_llama(tmp_path / "padded", vocab=288, seed=5))
    params = [greedy(40), greedy(40), greedy(90, temperature=3.0)]
    prompts = [[1, 2], [3], [7]]
    for target, draft in ((l2, padded), (padded, l2)):
        with Engine(target, **SMALL) as engine:
            expected = engine.generate(prompts, params)
        with Engine(target, draft, **SMALL) as engine:
            assert_same(engine.generate(prompts, params), expected, draft)
        # The draft model's law is handed over, in the target's size.
        with Engine(target, draft, verification="rejection", policy="fixed", **SMALL) as engine:
            sampled = engine.generate(prompts, params)
            assert_same(sampled[:2], expected[:2], draft)
            assert sampled[2].metrics.drafted_tokens > 90
            assert max(sampled[2].token_ids) < (264 if target is l2 else 288)


def test_prompt_text_is_encoded_once_and_alike(l2: Path, tmp_path: Path) -> None:
    model = tiny.byte_tokenizer(tiny.tiny_llama(tmp_path / "bos", vocab=264), add_bos=True)
    with Engine(model, **SMALL) as plain, Engine(model, DraftModel(model=model), **SMALL) as fast:
        for engine in (plain, fast):
            output = engine.generate("ab<|eos|>", greedy(4))
            assert output.prompt_token_ids == [256, 97, 98, 257]
            chat = engine.chat([{"role": "user", "content": "ab"}], greedy(4))
            assert chat.prompt_token_ids[0] == 258
            assert 256 not in chat.prompt_token_ids[1:]


# Trees, with two candidates that are nearly equal.


def test_tree_over_close_candidates(make_bigram: Callable[..., Path]) -> None:
    draw = np.random.default_rng(6)
    table = draw.normal(0, 0.3, (16, 16)).astype(np.float32)
    for row in table:
        first, second = draw.permutation(16)[:2]
        row[first], row[second] = 4.0, 3.99

    class Wide(Drafter):
        """Four children each, three deep, the runner-up always first."""

        num_speculative_tokens = 84

        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            ids: list[int] = []
            parents: list[int] = []
            level = [(-1, tokens[-1])]
            for _ in range(3):
                below = []
                for parent, token in level:
                    order = np.argsort(-table[token], kind="stable").tolist()
                    for child in (order[1], order[2], order[0], order[3]):
                        ids.append(child)
                        parents.append(parent)
                        below.append((len(ids) - 1, child))
                level = below
            return DraftTree(ids[:budget], parents[:budget])

    options: dict[str, Any] = {"max_model_len": 600, "max_batch_size": 1, "threads": 1}
    model = make_bigram(table)
    with Engine(model, **options) as engine:
        expected = engine.generate([0], greedy(500))
    best = [0]
    for _ in range(500):
        best.append(int(table[best[-1]].argmax()))
    assert expected.token_ids == best[1:]
    with Engine(model, Wide(), block_size=1, check_invariants=True, **options) as engine:
        output = engine.generate([0], greedy(500))
    assert_same([output], [expected], "tree")
    assert output.metrics.acceptance_length == 4.0


TREES: dict[str, Callable[[int], DraftTree]] = {
    "depth 1, width 4": lambda t: DraftTree([t + 3, t + 2, t + 1, t], [-1] * 4),
    "chain of 4": lambda t: DraftTree([t + 1, t + 2, t + 3, t + 4], [-1, 0, 1, 2]),
    "one node": lambda t: DraftTree([t + 1], [-1]),
    "empty": lambda t: DraftTree([], []),
    "two chains": lambda t: DraftTree([t, t + 1, t + 1, t + 2], [-1, -1, 0, 1]),
    "comb": lambda t: DraftTree([t, t + 1, t, t + 2, t, t + 3], [-1, -1, 1, 1, 3, 3]),
}


@pytest.mark.parametrize("shape", TREES)
def test_shapes_of_trees(counter: Path, shape: str) -> None:
    class Shaped(Drafter):
        num_speculative_tokens = 8

        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            return TREES[shape](tokens[-1])

    with Engine(counter, Shaped(), check_invariants=True, **SMALL) as engine:
        outputs = engine.generate([[1], [40, 50]], greedy(30))
    assert outputs[0].token_ids == list(range(2, 32))
    assert outputs[1].token_ids == list(range(51, 81))
    assert (outputs[0].metrics.accepted_tokens > 0) == (shape != "empty")


def test_trees_that_are_none() -> None:
    for tokens, parents in (
        ([1, 1], [-1, -1]),  # twins
        ([1, 2], [-1, 1]),  # its own parent
        ([1, 2], [1, -1]),  # a parent behind its child
        ([1, 2], [-1, 5]),  # no such parent
        ([1, 2], [-2, 0]),
        ([1, 2], [-1]),
        ([-1], [-1]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"\[(tokens|parents)\]"):
            DraftTree(tokens, parents)
    with pytest.raises(InvalidArgumentError, match=r"\[log_probs\]"):
        DraftTree([1], [-1], log_probs=[float("nan")])


# Drafters in Python.


class Faulty(Counting):
    """Does `act` when it sees token 100."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def propose(self, tokens: list[int], budget: int) -> Any:
        return self.act() if tokens[-1] >= 100 else super().propose(tokens, budget)


def stumble() -> None:
    raise KeyError("lost my notes")


ACTS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (stumble, "lost my notes"),
    "a list": (lambda: [1, 2, 3], "expected a DraftTree or None"),
    "a number": (lambda: 7, "expected a DraftTree or None"),
    "too large an id": (lambda: DraftTree.chain([256]), r"256"),
    "twins": (lambda: DraftTree([1, 1], [-1, -1]), "siblings that differ"),
}


@pytest.mark.parametrize("act", ACTS)
def test_faulty_drafter_harms_its_own_request_only(counter: Path, act: str) -> None:
    what, message = ACTS[act]
    prompts = [[5], [98], [30], [97], [60]]
    options = {**SMALL, "max_batch_size": 5}
    with Engine(counter, Faulty(what), check_invariants=True, **options) as engine:
        free = engine._decoder.free_kv_tokens
        with pytest.raises(SpecrtError, match=f"Faulty.*{message}") as caught:
            engine.generate(prompts, greedy(20))
        outputs = caught.value.outputs
        assert [one is None for one in outputs] == [False, True, False, True, False]
        for prompt, output in zip(prompts, outputs, strict=True):
            if output is not None:
                assert output.token_ids == [prompt[0] + 1 + i for i in range(20)]
        assert engine._decoder.free_kv_tokens == free
        with pytest.raises(SpecrtError, match=message):
            list(engine.stream([98], greedy(20)))
        assert engine.generate([5], greedy(20)).token_ids == list(range(6, 26))


def test_faulty_observer(counter: Path) -> None:
    class Deaf(Counting):
        def observe(self, committed: list[int]) -> None:
            if 100 in committed:
                raise RuntimeError("cannot hear")

    with Engine(counter, Deaf(), **SMALL) as engine:
        with pytest.raises(SpecrtError, match="cannot hear") as caught:
            engine.generate([[5], [97]], greedy(20))
        assert caught.value.outputs[0].token_ids == list(range(6, 26))
        assert engine.generate([5], greedy(20)).token_ids == list(range(6, 26))


def test_drafter_that_says_nothing(counter: Path) -> None:
    class Silent(Drafter):
        def propose(self, tokens: list[int], budget: int) -> None:
            return None

    with Engine(counter, Silent(), **SMALL) as engine:
        output = engine.generate([5], greedy(10))
    assert output.token_ids == list(range(6, 16))
    assert output.metrics.drafted_tokens == 0
    assert output.metrics.acceptance_rate == 0.0


def test_drafter_sees_the_whole_text_and_what_was_committed(counter: Path) -> None:
    seen: list[list[int]] = []
    heard: list[int] = []

    class Listening(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            seen.append(tokens)
            assert budget == 3
            return super().propose(tokens, budget)

        def observe(self, committed: list[int]) -> None:
            heard.extend(committed)

    with Engine(counter, Listening(), num_speculative_tokens=3, **SMALL) as engine:
        engine.generate([9, 8, 7], greedy(11))
    assert seen == [[9, 8, *range(7, 9)], [9, 8, *range(7, 13)], [9, 8, *range(7, 17)]]
    assert heard == list(range(8, 17))


def test_drafts_beyond_the_budget_are_cut(counter: Path) -> None:
    class Greedy(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            return super().propose(tokens, 50)

    with Engine(counter, Greedy(), num_speculative_tokens=4, **SMALL) as engine:
        metrics = engine.generate([1], greedy(21)).metrics
    assert metrics.rounds == 4
    assert metrics.drafted_tokens == 16


# Fixed pairs, so that a change of acceptance is seen. Bigram models decide by tables alone, so
# these numbers hold on every machine.


def test_golden_counts_of_bigram_pairs(make_bigram: Callable[..., Path]) -> None:
    draw = np.random.default_rng(10)
    logits = draw.normal(0, 2, (16, 16)).astype(np.float32)
    near = logits + draw.normal(0, 1.0, (16, 16)).astype(np.float32)
    target, draft = make_bigram(logits), make_bigram(near)
    options = {"max_model_len": 256, "num_speculative_tokens": 4, "cpu_isa": "scalar", "threads": 1}
    with Engine(target, DraftModel(model=draft), policy="fixed", **options) as engine:
        params = [
            SamplingParams(max_tokens=200, seed=s, temperature=t)
            for s, t in ((1, 0.0), (1, 0.5), (1, 1.0), (2, 1.5))
        ]
        outputs = engine.generate([[0]] * 4, params)
    counts = [
        (one.metrics.rounds, one.metrics.drafted_tokens, one.metrics.accepted_tokens)
        for one in outputs
    ]
    assert counts == GOLDEN


GOLDEN = [(51, 201, 148), (113, 448, 86), (78, 311, 121), (64, 246, 135)]
"""Rounds, drafted and accepted tokens at temperatures 0, 0.5, 1 and 1.5."""


def test_counters_of_scripted_drafters(l2: Path) -> None:
    prompt = [3, 1, 4, 1, 5]
    with Engine(l2, **SMALL) as engine:
        texts = known([engine.generate(prompt, greedy(61))])

    def counts(drafter: Drafter, gamma: int) -> tuple[int, int, int]:
        sizes: list[int] = []
        watched = Watched(drafter, lambda _, tree: sizes.append(len(tree)))
        options = {"num_speculative_tokens": gamma, "policy": "fixed", **SMALL}
        with Engine(l2, watched, **options) as engine:
            metrics = engine.generate(prompt, greedy(61)).metrics
        assert metrics.drafted_tokens <= sum(sizes)
        return metrics.rounds, metrics.drafted_tokens, metrics.accepted_tokens

    assert counts(Oracle(texts, 264), 5) == (10, 50, 50)
    assert counts(Oracle(texts, 264), 64) == (1, 59, 59)
    assert counts(AlwaysWrong(texts, 264), 1) == (60, 59, 0)
    rounds, _, accepted = counts(HalfRight(texts, 264), 8)
    assert rounds + accepted == 60
    assert rounds == 20
    rounds, _, accepted = counts(Branching(texts, 264), 16)
    assert rounds + accepted == 60
    assert rounds <= 12
