"""Structured output: valid by an independent judge, and the same bytes whatever drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import (
    AlwaysWrong,
    Branching,
    HalfRight,
    LaterSiblings,
    Oracle,
    Tally,
    assert_same,
    greedy,
    known,
)

import specrt
from specrt import (
    DraftTree,
    Engine,
    InvalidArgumentError,
    SamplingParams,
    SpecrtError,
    StructuredOutputs,
    UnsupportedError,
)
from specrt.drafters import DraftModel, NGram

OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_batch_size": 8, "threads": 1}
EOS = 257
DIGITS = StructuredOutputs(regex="[0-9]+")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`l2`, where the tokenizer's own end token ends a text."""
    path = tmp_path_factory.mktemp("models") / "structured"
    return tiny.byte_tokenizer(tiny.tiny_llama(path, vocab=264, eos_token_id=EOS))


# Schemas.


def schema(draw: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """A random schema whose texts are of bounded length but for the digits of numbers."""
    kinds = ["boolean", "null", "integer", "number", "string", "pattern", "enum", "const"]
    if depth < 2:
        kinds += ["object", "array", "anyOf"] * 2
    kind = kinds[draw.integers(len(kinds))]
    if depth == 0:
        kind = ("object", "array", kind)[draw.integers(3)]
    if kind == "integer":
        low = int(draw.integers(-40, 40))
        return {"type": kind, "minimum": low, "maximum": low + int(draw.integers(1, 500))}
    if kind == "number":
        return {"type": kind, "minimum": -3, "exclusiveMaximum": 8.5}
    if kind == "string":
        low = int(draw.integers(0, 3))
        return {"type": kind, "minLength": low, "maxLength": low + int(draw.integers(0, 6))}
    if kind == "pattern":
        patterns = ["^[a-f]{2,4}$", "^(ab|cd)+e$", "^[0-9]{4}-[0-9]{2}$", "^x[yz]?$"]
        return {"type": "string", "pattern": patterns[draw.integers(4)], "maxLength": 9}
    if kind == "enum":
        return {"enum": ["red", "green", 3, None, True, 'a "quoted" one'][: draw.integers(2, 7)]}
    if kind == "const":
        return {"const": {"k": [1, 2, "drei"]}}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(2)]}
    if kind == "array":
        low = int(draw.integers(0, 3))
        inner = schema(draw, depth + 1)
        return {"type": kind, "items": inner, "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = ["id", "name", "é", "tags"][: draw.integers(1, 5)]
        return {
            "type": kind,
            "properties": {name: schema(draw, depth + 1) for name in names},
            "required": names[: draw.integers(0, len(names) + 1)],
            "additionalProperties": False,
        }
    return {"type": kind}


class Batch:
    """Fifty schemas as requests, and what the model says to them without drafts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        draw = np.random.default_rng(17)
        self.schemas = [schema(draw) for _ in range(50)]
        self.prompts = [list(b"Say it as JSON: "[: 1 + i % 16]) + [97 + i // 16] * 3
                        for i in range(50)]  # fmt: skip
        self.params = [
            SamplingParams(
                max_tokens=400,
                seed=i,
                temperature=(0.0, 1.0, 2.0)[i % 3],
                frequency_penalty=8.0,  # gets out of a number's digits some day
                logprobs=1 if i % 4 == 0 else None,
                structured_outputs=StructuredOutputs(json=one if i % 2 else json.dumps(one)),
            )
            for i, one in enumerate(self.schemas)
        ]
        with Engine(path, **{**OPTIONS, "max_batch_size": 1}) as engine:
            pairs = zip(self.prompts, self.params, strict=True)
            self.expected = [engine.generate(prompt, one) for prompt, one in pairs]
        self.texts = known(self.expected)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    return Batch(model)


def test_fifty_schemas_give_valid_json(batch: Batch) -> None:
    import jsonschema

    kinds: set[str] = set()
    for wanted, output in zip(batch.schemas, batch.expected, strict=True):
        assert output.finish_reason == "stop", (wanted, output.text)
        value = json.loads(output.text)
        jsonschema.validate(value, wanted)
        kinds |= {type(value).__name__, *re.findall(r'"type": "(\w+)"', json.dumps(wanted))}
        assert output.stop_reason is None
    assert kinds >= {"dict", "list", "integer", "number", "string", "boolean", "array", "object"}
    assert len({output.text for output in batch.expected}) >= 40


@pytest.mark.parametrize("gamma", [1, 4, 16])
@pytest.mark.parametrize(
    "kind", ["none", "oracle", "half", "wrong", "tree", "self", "other", "ngram", "illegal"]
)
def test_same_json_with_drafts(
    batch: Batch, model: Path, l2_other: Path, kind: str, gamma: int
) -> None:
    later = LaterSiblings()
    drafter: Any = {
        "none": lambda: None,
        "oracle": lambda: Oracle(batch.texts, 256),
        "half": lambda: HalfRight(batch.texts, 256),
        "wrong": lambda: AlwaysWrong(batch.texts, 256),
        "tree": lambda: later.watch(Branching(batch.texts, 256)),
        "self": lambda: DraftModel(model=model),
        "other": lambda: DraftModel(model=l2_other),
        "ngram": lambda: NGram(prompt_lookup_min=1),
        "illegal": lambda: Letters(),
    }[kind]()
    budget = None if drafter is None else gamma
    options = {**OPTIONS, "max_batch_size": 1 + gamma % 8, "check_invariants": True}
    with Engine(batch.path, drafter, num_speculative_tokens=budget, **options) as engine:
        free = engine._decoder.free_kv_tokens
        outputs = engine.generate(batch.prompts, batch.params)
        assert engine._decoder.free_kv_tokens == free
    assert_same(outputs, batch.expected, (kind, gamma))
    tally = Tally()
    tally.add(outputs)
    if kind == "oracle":
        # The token that ends a text counts as the target's own.
        assert tally.accepted >= tally.drafted - 50 > 500
    if kind in ("half", "tree") and gamma > 1:
        assert 0.2 < tally.accepted / tally.drafted < 0.95
    if kind == "tree" and gamma > 1:
        assert later.count(batch.texts) >= 50
    if kind == "wrong":
        assert tally.accepted < 0.05 * max(1, tally.drafted)
    if kind == "illegal":
        assert tally.drafted < 0.2 * sum(len(one.token_ids) for one in outputs)
    if kind == "self":
        # The draft model keeps to the grammar too, so that it says what the target says.
        assert tally.accepted >= tally.drafted - 50 > 500
    if kind == "other" and gamma < 16:
        assert 0.1 < tally.accepted / tally.drafted < 0.9
    if kind in ("other", "ngram"):
        assert 0 < tally.accepted <= tally.drafted


class Letters(specrt.Drafter):
    """A letter that no number has, and bytes that no JSON has: hardly ever allowed."""

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        return DraftTree([90, 0, 91, 255][:budget], [-1, 0, -1, 2][:budget])


def test_draft_that_the_grammar_forbids_is_pruned(model: Path) -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_tokens=60, seed=2, temperature=temperature, structured_outputs=DIGITS
        )
        with Engine(model, **OPTIONS) as engine:
            expected = engine.generate("n = ", params)
        assert re.fullmatch("[0-9]+", expected.text)
        for gamma in (1, 4):
            with Engine(model, Letters(), num_speculative_tokens=gamma, **OPTIONS) as engine:
                output = engine.generate("n = ", params)
            assert_same([output], [expected], gamma)
            assert output.metrics.drafted_tokens == 0
            assert output.metrics.rounds == len(output.token_ids) - 1


class Fixed(specrt.Drafter):
    """Goes on with a text, whatever has come out of it."""

    def __init__(self, text: str, prompt: int) -> None:
        self.text, self.prompt = text.encode(), prompt

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        done = len(tokens) - self.prompt
        return DraftTree.chain(list(self.text[done : done + budget]))


@pytest.mark.parametrize("end", range(1, 7))
def test_grammar_that_ends_inside_a_draft(model: Path, end: int) -> None:
    text = "abcdefgh"
    for wanted in (
        StructuredOutputs(choice=[text[:end]]),
        StructuredOutputs(regex=text[:end]),
        StructuredOutputs(grammar=f'start: "{text[:end]}"'),
    ):
        with Engine(model, Fixed(text, 2), num_speculative_tokens=4, **OPTIONS) as engine:
            output = engine.generate([1, 2], greedy(40, structured_outputs=wanted, logprobs=1))
            assert engine._decoder.idle
        assert output.text == text[:end]
        assert output.token_ids == list(text[:end].encode())
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert len(output.logprobs) == end
        # Prefill's token, then rounds of four drafts and one more.
        assert output.metrics.rounds == (end - 1 + 4) // 5
        # The rest of the draft is not even counted.
        assert output.metrics.drafted_tokens <= end


def test_choices(model: Path) -> None:
    texts = ["yes", "no", "now", "é ü", 'a "b" \\ c', "line\nline", "{x}|[y]", "\U0001f600"]
    with Engine(model, NGram(prompt_lookup_min=1), **OPTIONS) as engine:
        for text in texts:
            wanted = StructuredOutputs(choice=[text])
            assert engine.generate("say ", greedy(40, structured_outputs=wanted)).text == text
        wanted = StructuredOutputs(choice=texts)
        params = [
            SamplingParams(temperature=4.0, seed=i, max_tokens=40, structured_outputs=wanted)
            for i in range(60)
        ]
        said = {one.text for one in engine.generate(["say "] * 60, params)}
    assert said <= set(texts)
    assert len(said) >= 3


# State.


class Log:
    """Every constraint made while it is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from specrt import structured

        self.states: list[Any] = []
        log = self

        class Recorded(structured.GrammarState):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self.tokens: list[int] = []
                log.states.append(self)

            def advance(self, token: int) -> None:
                super().advance(token)
                self.tokens.append(token)

            def accepts(self, tokens: list[int]) -> int:
                before = self.mask()
                count = super().accepts(tokens)
                assert (self.mask() == before).all()
                return count

            def mask(self) -> np.ndarray:
                mask = np.zeros(9, np.uint32)
                self.fill_bitmask(mask)
                return mask

        monkeypatch.setattr(structured, "GrammarState", Recorded)


def test_state_after_rejections_equals_replay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    bracket = StructuredOutputs(grammar='start: ("(" start* ")")+')
    rounds = rejected = 0
    for wanted, other in ((DIGITS, 48), (bracket, 41)):
        params = SamplingParams(
            max_tokens=700, seed=3, temperature=1.5, structured_outputs=wanted,
            logit_bias={EOS: -100.0},
        )  # fmt: skip
        with Engine(model, **{**OPTIONS, "max_model_len": 800}) as engine:
            expected = engine.generate([1], params)
            replay = engine._intake.grammar().compile(wanted)
        for drafter in (Same(other), HalfRight(known([expected]), 256)):
            log.states.clear()
            options = {**OPTIONS, "max_model_len": 800}
            # The brake would draft less where a row is dear, on AVX2 say.
            how: dict[str, Any] = {"num_speculative_tokens": 3, "policy": "fixed"}
            with Engine(model, drafter, **how, **options) as engine:
                output = engine.generate([1], params)
            assert_same([output], [expected], drafter)
            rounds += output.metrics.rounds
            rejected += output.metrics.drafted_tokens - output.metrics.accepted_tokens
            states = [one for one in log.states if one.tokens]
            assert len(states) == 1
            assert states[0].tokens == output.token_ids
            again = replay.again()
            for token in output.token_ids:
                again.advance(token)
            assert (again.mask() == states[0].mask()).all()
            assert again.finished() == states[0].finished()
    assert rounds > 1000
    assert rejected > 300


class Same(specrt.Drafter):
    """One token in two lengths: allowed as often as not, and mostly wrong."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        return DraftTree.chain([self.token] * (1 + len(tokens) % budget))


def test_white_space_has_an_end(model: Path) -> None:
    # A model that likes nothing better than blanks and new lines.
    liked = dict.fromkeys((9, 10, 13, 32), 100.0)
    wanted = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    params = greedy(400, logit_bias=liked, structured_outputs=StructuredOutputs(json=wanted))
    with Engine(model, NGram(prompt_lookup_min=1), **OPTIONS) as engine:
        output = engine.generate("x", params)
    assert output.finish_reason == "stop"
    assert set(json.loads(output.text)) == {"a", "b"}
    assert max(len(one) for one in re.findall(r"\s*", output.text)) == 25


def test_different_grammars_in_one_batch(model: Path) -> None:
    wanted = [
        DIGITS,
        StructuredOutputs(regex="[a-z]{3,9}"),
        None,
        StructuredOutputs(choice=["left", "right"]),
        StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3}),
        StructuredOutputs(grammar='start: "<" /[A-Z]{1,5}/ ">"'),
    ]
    params = [
        SamplingParams(max_tokens=20, seed=i, temperature=i % 2, structured_outputs=one)
        for i, one in enumerate(wanted)
    ]
    prompts = [[65 + i] * 5 for i in range(6)]
    with Engine(model, **OPTIONS) as engine:
        expected = [engine.generate(p, one) for p, one in zip(prompts, params, strict=True)]
    assert re.fullmatch("[0-9]+", expected[0].text)
    assert re.fullmatch("[a-z]{3,9}", expected[1].text)
    assert expected[3].text in ("left", "right")
    assert re.fullmatch("<[A-Z]{1,5}>", expected[5].text)
    half = HalfRight(known(expected), 256)
    for drafter in (None, half, NGram(prompt_lookup_min=1), DraftModel(model=model)):
        with Engine(model, drafter, **OPTIONS) as engine:
            assert_same(engine.generate(prompts, params), expected, drafter)


def test_samples_with_a_grammar(model: Path) -> None:
    wanted = StructuredOutputs(regex="[a-e]{4,8}")
    given: dict[str, Any] = {"max_tokens": 20, "seed": 1, "temperature": 5.0}
    params = SamplingParams(n=6, structured_outputs=wanted, **given)
    with Engine(model, **OPTIONS) as engine:
        expected = engine.generate("x" * 40, params)
    assert len({one.text for one in expected.outputs}) >= 5
    for one in expected.outputs:
        assert re.fullmatch("[a-e]{4,8}", one.text)
        assert one.finish_reason == "stop"
    assert [one.metrics.cached_prompt_tokens for one in expected.outputs] == [0, *[32] * 5]
    for drafter in (HalfRight(known([expected]), 256), DraftModel(model=model)):
        for size in (1, 8):
            options = {**OPTIONS, "max_batch_size": size}
            with Engine(model, drafter, **options) as engine:
                assert_same([engine.generate("x" * 40, params)], [expected], drafter)


def test_rejection_obeys_the_grammar(model: Path, l2_other: Path) -> None:
    import jsonschema

    wanted = {"type": "array", "items": {"enum": ["ab", "ac", 1]}, "minItems": 2, "maxItems": 4}
    outputs = []
    for drafter in (Letters(), NGram(prompt_lookup_min=1), DraftModel(model=l2_other), Same(49)):
        for one in (StructuredOutputs(json=wanted), DIGITS):
            params = [
                SamplingParams(max_tokens=60, seed=i, temperature=1.5, structured_outputs=one)
                for i in range(12)
            ]
            with Engine(model, drafter, verification="rejection", **OPTIONS) as engine:
                outputs = engine.generate([[i + 1] for i in range(12)], params)
                assert engine._decoder.idle
            for output in outputs:
                if one is DIGITS:
                    assert re.fullmatch("[0-9]+", output.text)
                else:
                    assert output.finish_reason == "stop"
                    jsonschema.validate(json.loads(output.text), wanted)
    # Greedy, it is what `coupled` says.
    params = greedy(60, structured_outputs=StructuredOutputs(json=wanted))
    said = set()
    for verification in ("coupled", "rejection"):
        with Engine(model, DraftModel(model=model), verification=verification, **OPTIONS) as engine:
            said.add(engine.generate("x", params).text)
    assert len(said) == 1
    with Engine(model, "ngram", verification="block", **OPTIONS) as engine:
        with pytest.raises(UnsupportedError, match=r"\[structured_outputs\].*block"):
            engine.generate([[1], [2]], [greedy(3), greedy(3, structured_outputs=DIGITS)])
        assert engine._decoder.idle


# The limits of the grammar engine.

HARD = "(a|b)*a(a|b){12}c"
"""Any text of a and b leads its automaton to states of its own."""


@pytest.mark.parametrize("states", [300, 850])
def test_grammar_too_complex_ends_at_one_place(model: Path, states: int) -> None:
    import llguidance

    params = SamplingParams(
        max_tokens=400, seed=4, temperature=50.0, n=2, logit_bias={ord("c"): float("-inf")},
        structured_outputs=StructuredOutputs(regex=HARD),
    )  # fmt: skip
    easy = greedy(30, structured_outputs=DIGITS)

    def run(drafter: Any, limit: int | None, size: int = 8) -> tuple[str, list[list[int]]]:
        options = {**OPTIONS, "max_batch_size": size}
        gamma = None if drafter is None else 6
        with Engine(model, drafter, num_speculative_tokens=gamma, **options) as engine:
            if limit is not None:
                engine._intake.grammar().limits = llguidance.LLParserLimits(max_lexer_states=limit)
            place, outputs = "", []
            try:
                outputs = engine.generate([[1], [2]], [params, easy])
            except SpecrtError as error:
                pattern = r"gave up: lexer error: too many[\s\S]*(at position \d+)"
                place, outputs = re.findall(pattern, str(error))[0], error.outputs[1:]
            assert engine._decoder.idle
            return place, [one.token_ids for output in outputs for one in output.outputs]

    error, plain = run(None, states)
    assert (error != "") == (states == 300)
    texts = [[1, *one] for one in run(None, None)[1]]
    for drafter in (
        AlwaysWrong(texts, 256),
        Wanderer(),
        Branching(texts, 256),
        Oracle(texts, 256),
        NGram(prompt_lookup_min=1),
        DraftModel(model=model),
    ):
        for size in (1, 8):
            assert run(drafter, states, size) == (error, plain), (drafter, size)


class Wanderer(specrt.Drafter):
    """Texts of a and b that nothing else leads to: their states fill a cache."""

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        draw = np.random.default_rng(len(tokens))
        return DraftTree.chain((97 + draw.integers(0, 2, budget)).tolist())


# Refusals.


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, NGram(prompt_lookup_min=1), **OPTIONS) as one:
        yield one


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(regex="(a"),
        StructuredOutputs(regex="a(?=b)c"),
        StructuredOutputs(json="{"),
        StructuredOutputs(json={"type": "thing"}),
        StructuredOutputs(json={"type": "string", "pattern": "("}),
        StructuredOutputs(json={"$ref": "#/nowhere"}),
        StructuredOutputs(json={"type": "object", "properties": 3}),
        StructuredOutputs(grammar="start: nothing"),
        StructuredOutputs(grammar="???"),
    ],
    ids=str,
)
def test_bad_grammars_stop_all_before_anything_runs(engine: Engine, wanted: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^\[structured_outputs\]"):
        engine.generate([[1], [2]], [greedy(5), greedy(5, structured_outputs=wanted)])
    assert engine._decoder.idle
    with pytest.raises(InvalidArgumentError, match=r"^\[structured_outputs\]"):
        engine.stream([1], greedy(5, structured_outputs=wanted))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "json": "{}"},
        {"regex": 3},
        {"grammar": b"start"},
        {"json": 3},
        {"json": ["a"]},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": [1]},
    ],
    ids=str,
)
def test_bad_structured_outputs_are_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^\[structured_outputs"):
        StructuredOutputs(**given)


def test_what_a_grammar_needs(l2: Path, engine: Engine) -> None:
    with (
        Engine(l2, **OPTIONS) as endless,
        pytest.raises(UnsupportedError, match=r"\[structured_outputs\].*end token"),
    ):
        endless.generate([1], greedy(5, structured_outputs=DIGITS))
    # Masks that leave the grammar nothing are an error of that request alone.
    params = [greedy(5), greedy(5, structured_outputs=DIGITS, allowed_token_ids=[65]), greedy(5)]
    with pytest.raises(SpecrtError, match=r"every token masked.*grammar") as caught:
        engine.generate([[1], [2], [3]], params)
    assert [one is None for one in caught.value.outputs] == [False, True, False]
    assert engine._decoder.idle


def test_trained_model_answers_as_json(demo_fp32: Path, demo_tokenizer: Any) -> None:
    import jsonschema

    wanted = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "capital": {"type": "boolean"},
            "rating": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["city", "capital", "rating"],
        "additionalProperties": False,
    }
    params = [
        greedy(60, structured_outputs=StructuredOutputs(json=wanted)),
        greedy(60, structured_outputs=StructuredOutputs(json=wanted), temperature=1.0),
    ]
    messages = [{"role": "user", "content": "Tell me about Paris as JSON."}]
    options = {"tokenizer": demo_tokenizer, "max_model_len": 256, "max_batch_size": 2}
    with Engine(demo_fp32, **options) as engine:
        expected = engine.chat([messages, messages], params)
    for output in expected:
        jsonschema.validate(json.loads(output.text), wanted)
        assert output.finish_reason == "stop"
    half = HalfRight(known(expected), demo_tokenizer.vocab_size)
    with Engine(demo_fp32, half, **options) as engine:
        assert_same(engine.chat([messages, messages], params), expected, "half")
