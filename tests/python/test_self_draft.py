"""The target as its own draft model: whole, with fewer layers, or rounded once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from helpers import assert_identities, assert_same, greedy

import specrt
from specrt import Engine, InvalidArgumentError, SamplingParams
from specrt.drafters import DraftModel, SelfDraft

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 5, "threads": 1}
PROMPTS = [[5], [1, 2, 3], list(range(30)), [7, 7, 7, 8], [200, 100]]
PARAMS = [
    greedy(40),
    SamplingParams(max_tokens=40, temperature=1.0, seed=1, logprobs=1),
    SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(max_tokens=40, temperature=1.3, top_k=20, repetition_penalty=1.2, seed=3),
    SamplingParams(max_tokens=40, frequency_penalty=0.5, seed=4),
]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers that add little each, so that the first few say nearly what all say."""
    path = tmp_path_factory.mktemp("models") / "deep"
    return tiny.byte_tokenizer(tiny.tiny_llama(path, vocab=264, layers=5, lm_head_scale=3.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_itself_is_always_right(l2: Path, dtype: str) -> None:
    with Engine(l2, dtype=dtype, **SMALL) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    for gamma in (1, 5):
        with Engine(
            l2,
            DraftModel(model=l2, dtype=dtype),
            dtype=dtype,
            num_speculative_tokens=gamma,
            **SMALL,
        ) as engine:
            for outputs in (
                engine.generate(PROMPTS, PARAMS),
                [engine.generate(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)],
            ):
                assert_same(outputs, expected, gamma)
                for one in outputs:
                    assert one.metrics.drafted_tokens > 0
                    assert one.metrics.accepted_tokens == one.metrics.drafted_tokens
                    assert_identities(one)


@pytest.mark.parametrize(
    ("dtype", "drafter"),
    [
        ("float32", SelfDraft()),
        ("float32", SelfDraft(precision="bfloat16")),
        ("float32", SelfDraft(layers=1)),
        ("bfloat16", SelfDraft(precision="int8")),
        ("bfloat16", SelfDraft(precision="w8a8")),
        ("bfloat16", SelfDraft(layers=4)),
        ("bfloat16", SelfDraft(precision="int4", layers=3)),
        ("int8", "self"),
        ("int8", SelfDraft(precision="w8a8")),
        ("int4", SelfDraft(layers=2)),
    ],
)
def test_same_text_and_memory_as_planned(deep: Path, dtype: str, drafter: Any) -> None:
    with Engine(deep, dtype=dtype, **SMALL) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    with Engine(deep, drafter, dtype=dtype, check_invariants=True, **SMALL) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        memory = engine.memory
    assert_same(outputs, expected, drafter)
    assert sum(one.metrics.drafted_tokens for one in outputs) > 0
    own = {name: value for name, value in SMALL.items() if name != "threads"}
    assert specrt.plan(deep, drafter, dtype=dtype, **own) == memory
    spec = SelfDraft() if drafter == "self" else drafter
    if spec.precision is None and spec.layers is not None:
        assert memory.drafter_weights == memory.drafter_kv_cache == 0
    else:
        whole = specrt.plan(deep, DraftModel(model=deep), dtype=dtype, **own)
        assert 0 < memory.drafter_weights < whole.drafter_weights


def test_int4_drafts_as_a_model_loaded_so(deep: Path) -> None:
    seen = []
    for drafter in (SelfDraft(precision="int4"), DraftModel(model=deep, dtype="int4")):
        with Engine(deep, drafter, **SMALL) as engine:
            outputs = engine.generate(PROMPTS, PARAMS)
        seen.append([(one.metrics.drafted_tokens, one.metrics.accepted_tokens) for one in outputs])
    assert seen[0] == seen[1]
    assert sum(accepted for _, accepted in seen[0]) > 20


def test_of_a_saved_target(deep: Path, tmp_path: Path) -> None:
    saved = tmp_path / "deep.specrt"
    with Engine(deep, dtype="bfloat16", **SMALL) as engine:
        engine.save(saved)
        expected = engine.generate(PROMPTS, PARAMS)
    for drafter in (SelfDraft(), SelfDraft(layers=3)):
        with Engine(saved, drafter, **SMALL) as engine:
            outputs = engine.generate(PROMPTS, PARAMS)
        # A saved file has no tokenizer, so no texts.
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        assert sum(one.metrics.accepted_tokens for one in outputs) > 0


def test_first_layers_after_a_prefix_hit(deep: Path) -> None:
    text = list(range(60))
    with Engine(deep, **SMALL) as engine:
        expected = engine.generate([*text, 9], greedy(30))
    with Engine(deep, SelfDraft(layers=3), check_invariants=True, **SMALL) as engine:
        fresh = engine.generate([*text, 9], greedy(30))
        again = engine.generate([*text, 9], greedy(30))
    assert_same([fresh], [expected], "fresh")
    assert again.token_ids == expected.token_ids
    assert again.metrics.cached_prompt_tokens > 0
    assert again.metrics.accepted_tokens == fresh.metrics.accepted_tokens


def test_nonsense_is_refused(deep: Path) -> None:
    for options in (
        {"precision": "fp4"}, {"precision": "float32"}, {"precision": 4}, {"precision": ""},
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=r"\[precision\]"):
            SelfDraft(**options)
    for name in ("layers", "num_speculative_tokens"):
        for value in (0, -1, 1.5, True, "2", 2**40):
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
                SelfDraft(**{name: value})
    for dtype, drafter, what in (
        ("float32", SelfDraft(layers=5), "fewer layers"),
        ("float32", SelfDraft(layers=6), r"\[layers\].*target's 5.*6"),
        ("int4", "self", "the target itself"),
        ("int8", SelfDraft(precision="int8"), "the target itself"),
        ("int4", SelfDraft(precision="int8"), r"\[precision\].*int4.*int8"),
        ("int8", SelfDraft(precision="bfloat16", layers=2), r"\[precision\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=what):
            Engine(deep, drafter, dtype=dtype, **SMALL)
        with pytest.raises(InvalidArgumentError, match=what):
            specrt.plan(deep, drafter, dtype=dtype, max_model_len=160, max_batch_size=5)
    with pytest.raises(InvalidArgumentError, match="got the class SelfDraft"):
        Engine(deep, SelfDraft, **SMALL)
