"""Every sampling field, alone and mixed: what a reference says, and the same bytes with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    AlwaysWrong,
    Branching,
    Counting,
    HalfRight,
    LaterSiblings,
    Oracle,
    Tally,
    assert_identities,
    assert_same,
    greedy,
    known,
)
from reference_sampler import assert_law, processed, softmax, target_logits

import specrt
from specrt import DraftTree, Engine, RequestOutput, SamplingParams, SpecrtError
from specrt.drafters import DraftModel, NGram

V = 264
TOKENS = 28
EOS = (10, 100, 200)
LETTERS = list(range(97, 123))
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "max_batch_size": 5,
    "threads": 1,
    "policy": "fixed",
}
LONGER = {**OPTIONS, "max_model_len": 160}

# Bad words are what the model says without them: see `rows`.
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition, strong": {"repetition_penalty": 5.0, "logprobs": 2},
    "repetition below 1, sampled": {"repetition_penalty": 0.8, "temperature": 1.0},
    "presence": {"presence_penalty": 12.0},
    "presence below 0, sampled": {"presence_penalty": -1.5, "temperature": 1.2, "logprobs": 1},
    "frequency": {"frequency_penalty": 3.0},
    "frequency, sampled": {"frequency_penalty": 0.7, "temperature": 0.8, "top_p": 0.9},
    "bias": {"logit_bias": dict.fromkeys(range(0, V, 2), -100.0)},
    "bias, sampled": {
        "logit_bias": {5: 8.0, 6: 9.5, 7: float("-inf"), 263: -3.0},
        "temperature": 1.0,
    },
    "allowed": {"allowed_token_ids": LETTERS},
    "allowed, sampled": {
        "allowed_token_ids": [*LETTERS, 10], "temperature": 1.5, "top_k": 9, "ignore_eos": True,
    },
    "bad words": {"allowed_token_ids": LETTERS, "bad_words": ()},
    "bad words, sampled": {"allowed_token_ids": LETTERS, "bad_words": (), "temperature": 2.0},
    "min tokens": {"min_tokens": 20, "stop_token_ids": list(range(0, V, 3))},
    "min tokens, sampled": {
        "min_tokens": 9, "stop_token_ids": list(range(0, V, 5)), "temperature": 2.0,
    },
    "min tokens, stop text": {
        "min_tokens": 12, "stop": list("abcdefghijk"), "allowed_token_ids": LETTERS,
    },
    "top k": {"temperature": 2.0, "top_k": 3},
    "top p": {"temperature": 2.0, "top_p": 0.6},
    "min p": {"temperature": 2.0, "min_p": 0.4, "logprobs": 3},
    "all penalties": {
        "repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 0,
    },
    "all penalties, sampled": {
        "repetition_penalty": 1.1, "presence_penalty": 2.0, "frequency_penalty": -0.3,
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02,
    },
    "everything": {
        "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "logit_bias": {97: 4.0, 98: -100.0}, "allowed_token_ids": [*LETTERS, 10, 100, 32],
        "bad_words": (), "min_tokens": 7, "logprobs": 1, "stop": "zz",
    },
    "everything, sampled": {
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "logit_bias": {97: 1.0}, "allowed_token_ids": [*LETTERS, 10, 100, 32], "bad_words": (),
        "min_tokens": 5, "temperature": 1.3, "top_k": 20, "top_p": 0.98, "min_p": 0.01,
        "stop_token_ids": [101], "logprobs": 2,
    },
}  # fmt: skip


class Rows:
    """A prompt for every setting, and what the model says to it without drafts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        draw = np.random.default_rng(8)
        self.prompts = [
            (draw.integers(97, 123, 4 + i % 3).tolist() * 9)[: 1 + 2 * i]
            for i in range(len(SETTINGS))
        ]
        self.given = [{"max_tokens": TOKENS, "seed": 40, **one} for one in SETTINGS.values()]
        with Engine(path, **{**OPTIONS, "max_batch_size": 1}) as engine:
            for prompt, one in zip(self.prompts, self.given, strict=True):
                if "bad_words" in one:
                    one["bad_words"] = self.words(engine, prompt, one)
            self.params = [SamplingParams(**one) for one in self.given]
            pairs = list(zip(self.prompts, self.params, strict=True))
            self.expected = [engine.generate(prompt, one) for prompt, one in pairs]
        self.texts = known(self.expected)

    @staticmethod
    def words(engine: Engine, prompt: list[int], given: dict[str, Any]) -> list[str]:
        """One token, two, three, and the prompt's last with the first of the output."""
        changes = {"bad_words": None, "stop": None, "stop_token_ids": None, "ignore_eos": True}
        text = engine.generate(prompt, SamplingParams(**{**given, **changes})).text
        assert len(text) == TOKENS
        edge = chr(prompt[-1]) + text[0]
        return [edge, text[3], text[6:8], text[10:13], text[13:15]]

    def run(self, drafter: Any, gamma: int | None, batch: int = 5) -> list[RequestOutput]:
        options = {**OPTIONS, "max_batch_size": batch, "check_invariants": True}
        with Engine(self.path, drafter, num_speculative_tokens=gamma, **options) as engine:
            outputs = engine.generate(self.prompts, self.params)
        for name, output, wanted in zip(SETTINGS, outputs, self.expected, strict=True):
            assert output.token_ids == wanted.token_ids, (name, gamma, batch)
        assert_same(outputs, self.expected, (gamma, batch))
        return outputs


@pytest.fixture(scope="module")
def rows(l2_eos: Path) -> Rows:
    return Rows(l2_eos)


# Against the reference.


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_run_agrees_with_the_reference(rows: Rows, name: str) -> None:
    row = list(SETTINGS).index(name)
    prompt, given, output = rows.prompts[row], rows.given[row], rows.expected[row]
    ids = output.token_ids
    assert len(ids) >= given.get("min_tokens", 10)
    with Engine(rows.path, **OPTIONS) as engine:
        raw = engine.generate(prompt, SamplingParams(**{**given, "logprobs": V}))
    assert raw.token_ids == ids
    logits = target_logits(rows.path, [*prompt, *ids])
    ends = [*EOS, *given.get("stop_token_ids", ())]
    bad = [list(word.encode()) for word in given.get("bad_words", ())]
    changed = 0
    for i, token in enumerate(ids):
        own = logits[len(prompt) + i - 1]
        told = np.array([raw.logprobs[i][one].logprob for one in range(V)])
        np.testing.assert_allclose(told, np.log(softmax(own)), atol=1e-4)
        scores = processed(own, prompt, ids[:i], given, end_tokens=ends, bad_words=bad)
        # Raw log-probabilities are the logits but for a constant, which only one field minds.
        if "repetition_penalty" not in given:
            again = processed(told, prompt, ids[:i], given, end_tokens=ends, bad_words=bad)
            assert (np.isneginf(again) == np.isneginf(scores)).all()
            np.testing.assert_allclose(softmax(again), softmax(scores), atol=1e-3)
        assert np.isfinite(scores[token]), (name, i)
        if SamplingParams(**given).temperature == 0.0:
            assert token == scores.argmax(), (name, i)
        changed += own.argmax() != token
    assert changed > 0 or name.startswith("min tokens"), name


LAWS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6, "top_p": 0.9},
    {"presence_penalty": 1.5, "top_k": 6},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 1.0, "min_p": 0.05},
    {"logit_bias": {1: 2.0, 5: -1.5, 7: float("-inf")}},
    {"allowed_token_ids": [0, 2, 3, 9, 11], "frequency_penalty": 0.5},
    {"min_tokens": 2, "stop_token_ids": [1, 2, 3]},
    {
        "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
        "logit_bias": {4: 1.0}, "allowed_token_ids": list(range(1, 12)), "top_p": 0.95,
    },
]  # fmt: skip


@pytest.mark.parametrize("given", LAWS, ids=str)
def test_law_with_history(given: dict[str, Any], make_bigram: Callable[..., Path]) -> None:
    draw = np.random.default_rng(21)
    logits = draw.normal(0, 1.5, (16, 16)).astype(np.float32)
    draft = (logits + draw.normal(0, 1.0, (16, 16))).astype(np.float32)
    given = {"temperature": 1.1, **given}
    prompt, count = [3, 0], 4000
    ends = given.get("stop_token_ids", [])

    def law(output: Sequence[int]) -> np.ndarray:
        last = [*prompt, *output][-1]
        return softmax(processed(logits[last], prompt, output, given, end_tokens=ends))

    first = law([])
    joint = np.array([first[token] * law([token]) for token in range(16)])
    drafter = DraftModel(model=make_bigram(draft))
    options = {"max_model_len": 16, "max_batch_size": 256, "threads": 1}
    with Engine(make_bigram(logits), drafter, num_speculative_tokens=2, **options) as engine:
        params = [SamplingParams(max_tokens=3, seed=i, **given) for i in range(count)]
        tokens = [one.token_ids for one in engine.generate([prompt] * count, params)]
    seen = np.zeros((16, 16))
    for one in tokens:
        seen[one[0], one[1]] += 1
    assert_law(seen.sum(1), first, (given, "first"))
    assert_law(seen, joint, (given, "pair"))
    # What penalties make of the third, after the pair that came up most.
    pair = np.unravel_index(seen.argmax(), seen.shape)
    if not set(pair) & set(ends):
        third = [one[2] for one in tokens if (one[0], one[1]) == pair]
        assert len(third) >= 100
        assert_law(np.bincount(third, minlength=16), law([int(one) for one in pair]), given)


# The same bytes with drafts.


@pytest.mark.parametrize("gamma", [1, 4, 16])
@pytest.mark.parametrize(
    "kind", ["oracle", "half", "wrong", "tree", "self", "close", "other", "ngram"]
)
def test_same_with_drafts(
    rows: Rows, l2: Path, l2_close: Path, l2_other: Path, kind: str, gamma: int
) -> None:
    later = LaterSiblings()
    drafter: Any = {
        "oracle": lambda: Oracle(rows.texts, 256),
        "half": lambda: HalfRight(rows.texts, 256),
        "wrong": lambda: AlwaysWrong(rows.texts, 256),
        "tree": lambda: later.watch(Branching(rows.texts, 256)),
        "self": lambda: DraftModel(model=l2),
        "close": lambda: DraftModel(model=l2_close),
        "other": lambda: DraftModel(model=l2_other),
        "ngram": lambda: NGram(prompt_lookup_min=1),
    }[kind]()
    outputs = rows.run(drafter, gamma)
    tally = Tally()
    tally.add(outputs)
    assert tally.drafted > 100
    for name, output in zip(SETTINGS, outputs, strict=True):
        metrics = output.metrics
        assert metrics.drafted_tokens > 0 or kind == "ngram"
        if kind in ("oracle", "self"):
            # The draft model sees the same history as the target, its own guesses included.
            assert metrics.accepted_tokens == metrics.drafted_tokens or metrics.truncated_rounds
            assert metrics.alpha in (0.0, 1.0), name
            assert metrics.alpha == 1.0 or metrics.rounds == metrics.truncated_rounds, name
        if kind == "wrong":
            assert metrics.accepted_tokens == 0, name
        if kind in ("half", "tree") and gamma > 1 and len(output.token_ids) > 12:
            assert 0 < metrics.accepted_tokens < metrics.drafted_tokens, name
    if kind == "half" or (kind == "tree" and gamma > 1) or (kind == "close" and gamma < 16):
        tally.assert_mixed()
    if kind in ("ngram", "other"):
        assert 0 < tally.accepted < 0.7 * tally.drafted
    if kind == "tree" and gamma > 1:
        assert later.count(rows.texts) >= 40


@pytest.mark.parametrize("kind", ["half", "tree", "close", "ngram", "none"])
def test_same_alone(rows: Rows, l2_close: Path, kind: str) -> None:
    drafter: Any = {
        "half": lambda: HalfRight(rows.texts, 256),
        "tree": lambda: Branching(rows.texts, 256),
        "close": lambda: DraftModel(model=l2_close),
        "ngram": lambda: NGram(prompt_lookup_min=1),
        "none": lambda: None,
    }[kind]()
    rows.run(drafter, None if kind == "none" else 4, batch=1)
    if kind == "none":
        rows.run(None, None, batch=5)


# min_tokens, on counters: what is masked goes to token 0, the lower id of equals.


def ends(path: Path, drafters: Sequence[Any], prompt: list[int], params: SamplingParams) -> Any:
    """The same output with each drafter."""
    outputs = []
    for drafter in drafters:
        for gamma in (None,) if drafter is None else (1, 4, 7):
            with Engine(path, drafter, num_speculative_tokens=gamma, **LONGER) as engine:
                outputs.append(engine.generate(prompt, params))
    assert_same(outputs, [outputs[0]] * len(outputs), params)
    return outputs[0]


def counting_table() -> np.ndarray:
    table = np.zeros((256, 256), np.float32)
    table[np.arange(256), (np.arange(256) + 1) % 256] = 40.0
    return table


def test_min_tokens_holds_off_every_end(make_bigram: Callable[..., Path]) -> None:
    model = make_bigram(counting_table(), eos_token_id=100)
    drafters = [None, Counting(), NGram(prompt_lookup_min=1), DraftModel(model=model)]
    for least in range(9):
        # 96 97 98 99, then the end token: at the earliest place if it may come there.
        output = ends(model, drafters, [95], greedy(200, min_tokens=least))
        if least <= 4:
            assert output.token_ids == [96, 97, 98, 99, 100]
        else:
            assert output.token_ids == [96, 97, 98, 99, *range(101)]
        assert output.finish_reason == "stop"
        # A stop token of one's own, likewise.
        output = ends(model, drafters, [45], greedy(200, min_tokens=least, stop_token_ids=[49]))
        if least <= 3:
            assert output.token_ids == [46, 47, 48, 49]
        else:
            assert output.token_ids == [46, 47, 48, *range(50)]
        assert output.stop_reason == 49
        # Text that ends within min_tokens is no stop; what ends later is, wherever it began.
        output = ends(model, drafters, [64], greedy(30, min_tokens=least, stop="BCD"))
        assert output.finish_reason == ("stop" if least <= 4 else "length")
    # ignore_eos takes the model's own end token out of all this.
    output = ends(model, drafters, [95], greedy(12, min_tokens=8, ignore_eos=True))
    assert output.token_ids == list(range(96, 108))
    # The longest there is: no end at all before the limit.
    output = ends(model, drafters, [95], greedy(8, min_tokens=8))
    assert (output.token_ids, output.finish_reason) == ([96, 97, 98, 99, 0, 1, 2, 3], "length")


def test_stop_texts_around_min_tokens(counter: Path) -> None:
    drafters = [None, Counting()]
    for least in range(12):
        output = ends(counter, drafters, [96], greedy(40, min_tokens=least, stop=["bcd", "fgh"]))
        # "bcd" ends with the fourth token, "fgh" with the eighth.
        if least <= 4:
            assert (output.text, output.stop_reason, len(output.token_ids)) == ("a", "bcd", 4)
        elif least <= 8:
            assert (output.text, output.stop_reason) == ("abcde", "fgh")
        else:
            assert output.finish_reason == "length"
            assert output.text.startswith("abcdefghijklmnop")
    # One that is over does not come up again as the beginning of a longer one.
    output = ends(counter, drafters, [96], greedy(6, min_tokens=4, stop=["bc", "abcx"]))
    assert (output.text, output.finish_reason) == ("abcdef", "length")


# bad_words.


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["e"], "bcd"),
        (["de"], "bcd"),
        (["cde"], "bcd"),
        (["abcde"], "bcd"),  # begins in the prompt
        (["Zabcde"], "bcd"),
        (["zz", "efgh"], "bcdefg"),
        (["ab"], ""),  # the first token of the output
        (["aab", "b"], ""),
        (["bd", "ce", "xbcde"], "bcdefghij"),  # not there: nothing changes
    ],
)
def test_bad_words_one_after_another(counter: Path, words: list[str], text: str) -> None:
    drafters = [None, Counting(), NGram(prompt_lookup_min=1), DraftModel(model=counter)]
    prompt = list(b"Zabcdefghij\n Za")
    output = ends(counter, drafters, prompt, greedy(9, bad_words=words))
    if len(text) == 9:
        assert output.text == text
    else:
        # In place of the last token of the word: the lower id of what is left.
        rest = list(range(9 - len(text)))
        assert output.token_ids == [*text.encode(), *rest]


def test_bad_words_inside_words_and_at_their_start(demo_fp32: Path, demo_tokenizer: Any) -> None:
    params = greedy(24, seed=0)
    prompt = "The capital of France is"
    half: Any = None
    with Engine(demo_fp32, tokenizer=demo_tokenizer, **OPTIONS) as engine:
        free = engine.generate(prompt, params).text
        word = max(free.split(), key=len).strip(".,")
        without = engine.generate(prompt, greedy(24, bad_words=[word]))
        half = HalfRight(known([without]), demo_tokenizer.vocab_size)
    assert word in free
    assert word not in without.text
    with Engine(demo_fp32, half, tokenizer=demo_tokenizer, **OPTIONS) as engine:
        assert_same([engine.generate(prompt, greedy(24, bad_words=[word]))], [without], word)


# Nothing left, and what must never come.


def test_allowed_tokens_without_the_end_token(l2_eos: Path) -> None:
    some = [one for one in range(0, V, 2) if one not in EOS]
    for drafter in (None, NGram(prompt_lookup_min=1), DraftModel(model=l2_eos)):
        with Engine(l2_eos, drafter, **OPTIONS) as engine:
            for temperature in (0.0, 3.0):
                params = SamplingParams(
                    max_tokens=1000, seed=2, temperature=temperature, allowed_token_ids=some
                )
                output = engine.generate([1, 2, 3], params)
                assert output.finish_reason == "length"
                assert len(output.token_ids) == 93
                assert set(output.token_ids) <= set(some)


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_nothing_left_is_an_error_of_its_own(counter: Path, verification: str) -> None:
    bad = [
        greedy(20, allowed_token_ids=[65], bad_words=["A"]),
        greedy(20, allowed_token_ids=[65, 66], bad_words=["AA", "AB", "BB", "BA"]),
        greedy(20, allowed_token_ids=[65], logit_bias={65: float("-inf")}),
        greedy(20, allowed_token_ids=[65], stop_token_ids=[65], min_tokens=2),
        greedy(20, logit_bias=dict.fromkeys(range(256), float("-inf")), temperature=1.0),
    ]
    prompts = [[1], [2], [3], [4], [5], [6], [7]]
    params = [greedy(20), *bad, greedy(20)]
    for drafter in (None, Counting(), NGram(prompt_lookup_min=1), DraftModel(model=counter)):
        with Engine(
            counter, drafter, verification=verification, check_invariants=True, **OPTIONS
        ) as engine:
            free = engine._decoder.free_kv_tokens
            with pytest.raises(SpecrtError, match=r"1 prompt.*every token masked") as caught:
                engine.generate(prompts, params)
            outputs = caught.value.outputs
            assert [one is None for one in outputs] == [False, *[True] * 5, False]
            assert outputs[0].token_ids == list(range(2, 22))
            assert outputs[-1].token_ids == list(range(8, 28))
            for one in bad:
                with pytest.raises(SpecrtError, match="every token masked"):
                    engine.generate([9], one)
            assert engine._decoder.free_kv_tokens == free
            assert engine._decoder.idle


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [-100.0, float("-inf")])
def test_forbidden_favourite_never_comes(
    make_bigram: Callable[..., Path], temperature: float, bias: float
) -> None:
    draw = np.random.default_rng(5)
    table = draw.normal(0, 1.5, (16, 16)).astype(np.float32)
    table[:, 11] = 9.0  # the favourite of the target and of every drafter
    model = make_bigram(table)
    params = SamplingParams(
        max_tokens=500, seed=4, temperature=temperature, logit_bias={11: bias}, min_p=0.01
    )
    options: dict[str, Any] = {**OPTIONS, "max_model_len": 600}
    expected = None
    for drafter in (None, DraftModel(model=model), NGram(prompt_lookup_min=1), Always(11)):
        for verification in ("coupled", "rejection", "block"):
            with Engine(model, drafter, verification=verification, **options) as engine:
                output = engine.generate([0, 11, 11, 11], params)
            assert len(output.token_ids) == 500
            assert 11 not in output.token_ids
            if verification == "coupled":
                expected = expected or output
                assert_same([output], [expected], drafter)
            if isinstance(drafter, Always):
                assert output.metrics.drafted_tokens > 500
                assert output.metrics.accepted_tokens == 0


class Always(specrt.Drafter):
    """Says one token, again and again."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        return DraftTree.chain([self.token] * budget)


def test_penalties_see_tokens_of_the_same_round(make_bigram: Callable[..., Path]) -> None:
    # After x the model wants x again, and again; each time it has it, it wants it less.
    table = np.random.default_rng(2).normal(0, 0.2, (16, 16)).astype(np.float32)
    table[:, 4] += 5.0
    model = make_bigram(table)
    for given, most in (
        ({"presence_penalty": 6.0}, 1),
        ({"frequency_penalty": 2.0}, 3),
        ({"repetition_penalty": 50.0}, 1),
    ):
        params = greedy(100, **given)
        wanted: list[int] = []
        for _ in range(100):
            last = wanted[-1] if wanted else 0
            wanted.append(int(processed(table[last], [0], wanted, given).argmax()))
        assert wanted[:8].count(4) <= most
        oracle = Oracle([[0, *wanted]], 16)
        half = HalfRight([[0, *wanted]], 16)
        for drafter in (None, Always(4), oracle, half, DraftModel(model=model)):
            for gamma in (None,) if drafter is None else (2, 5):
                with Engine(model, drafter, num_speculative_tokens=gamma, **LONGER) as engine:
                    output = engine.generate([0], params)
                assert output.token_ids == wanted, (given, drafter, gamma)
                assert_identities(output)
                if drafter is oracle or isinstance(drafter, DraftModel):
                    assert output.metrics.acceptance_rate == 1.0
