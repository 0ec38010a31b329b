"""The same bytes: ids, log-probabilities and texts, whatever drafts and whatever else runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from specrt import Engine, RequestOutput, SamplingParams
from specrt.drafters import DraftModel, NGram

LENGTHS = (1, 2, 5, 17, 33, 40, 70)
TOKENS = 48
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.8, "top_k": 5, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.05, "logprobs": 4},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "logprobs": 1},
    {"logprobs": 3},
]
"""One a row: greedy and sampled, each filter alone and all together."""
ISAS = specrt.available_cpu_isas()


def rows(
    vocab: int, lengths: tuple[int, ...] = LENGTHS
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Seven prompts with repetitions in them, each with its own parameters."""
    draw = np.random.default_rng(11)
    prompts = []
    for length in lengths:
        phrase = draw.integers(0, vocab, 6).tolist()
        prompts.append((phrase * length)[:length])
    params = [greedy(TOKENS, **one, seed=100 + i) for i, one in enumerate(SETTINGS)]
    return prompts, params


class Subject:
    """One model in one precision at one ISA level, and what it says without a drafter."""

    def __init__(self, path: Path, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
        self.path = path
        self.options: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 7, **options}
        self.vocab = 256
        self.prompts, self.params = rows(self.vocab, lengths)
        self.expected = self.run(None, batch=1, threads=1)
        self.texts = known(self.expected)
        self.tally = Tally()

    def run(
        self, drafter: Any, gamma: int | None = None, *, batch: int = 7, **options: Any
    ) -> list[RequestOutput]:
        given = {**self.options, "check_invariants": True, **options}
        with Engine(self.path, drafter, num_speculative_tokens=gamma, **given) as engine:
            if batch == 7:
                return engine.generate(self.prompts, self.params)
            pairs = zip(self.prompts, self.params, strict=True)
            return [engine.generate(prompt, one) for prompt, one in pairs]

    def check(self, drafter: Any, gamma: int | None = None, **options: Any) -> list[RequestOutput]:
        outputs = self.run(drafter, gamma, **options)
        name = type(drafter).__name__
        assert_same(outputs, self.expected, (name, gamma, options))
        self.tally.add(outputs)
        return outputs

    def scripted(self) -> list[specrt.Drafter]:
        return [
            Oracle(self.texts, self.vocab),
            HalfRight(self.texts, self.vocab),
            HalfRight(self.texts, self.vocab, period=17),
            AlwaysWrong(self.texts, self.vocab),
        ]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("isa", ISAS)
def test_drafters_and_gammas(
    l2: Path, l2_close: Path, l2_other: Path, dtype: str, isa: str
) -> None:
    subject = Subject(l2, dtype=dtype, cpu_isa=isa)
    for gamma in (1, 3, 8, 64):
        for i, drafter in enumerate(subject.scripted()):
            subject.check(drafter, gamma, threads=1 + i % 2)
        subject.check(NGram(prompt_lookup_min=1), gamma, threads=2)
        subject.check(DraftModel(model=l2, dtype=dtype), gamma, threads=2)
    for gamma in (1, 3):
        subject.check(DraftModel(model=l2_close), gamma)
        subject.check(DraftModel(model=l2_other, dtype="bfloat16"), gamma)
    subject.tally.assert_mixed()


@pytest.mark.parametrize("isa", ISAS)
def test_trees(l2: Path, dtype: str, isa: str) -> None:
    subject = Subject(l2, dtype=dtype, cpu_isa=isa)
    later = LaterSiblings()
    for gamma in (1, 3, 8, 64):
        for threads in (1, 2):
            tree = later.watch(Branching(subject.texts, subject.vocab))
            subject.check(tree, gamma, threads=threads)
    assert later.count(subject.texts) >= 100
    subject.tally.assert_mixed()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "w8a8"])
def test_quantised_precisions(l2: Path, l2_close: Path, dtype: str, isa: str) -> None:
    subject = Subject(l2, dtype=dtype, cpu_isa=isa)
    later = LaterSiblings()
    for gamma in (3, 64):
        subject.check(HalfRight(subject.texts, subject.vocab), gamma, threads=2)
        subject.check(later.watch(Branching(subject.texts, subject.vocab)), gamma)
    subject.check(None, threads=2)
    subject.check(NGram(prompt_lookup_min=1), 8, batch=1)
    subject.check(DraftModel(model=l2, dtype=dtype), 3, max_num_batched_tokens=19, block_size=4)
    subject.check(DraftModel(model=l2_close, dtype="int4"), 3)
    assert later.count(subject.texts) >= 20
    subject.tally.assert_mixed()


def test_coarser_copy_of_the_target_as_drafter(l2: Path) -> None:
    """A target drafts for itself in another precision; it decides all the same."""
    subject = Subject(l2, dtype="bfloat16")
    for dtype in ("int4", "w8a8"):
        subject.check(DraftModel(model=l2, dtype=dtype), 4)


@pytest.mark.parametrize("threads", [1, 2])
def test_alone_as_in_a_batch(l2: Path, dtype: str, threads: int) -> None:
    subject = Subject(l2, dtype=dtype)
    subject.check(None, batch=7, threads=threads)
    for gamma in (1, 8, 64):
        for drafter in [*subject.scripted(), Branching(subject.texts, subject.vocab)]:
            subject.check(drafter, gamma, batch=1, threads=threads)
    subject.tally.assert_mixed()


def test_qwen2(qwen2: Path, dtype: str) -> None:
    subject = Subject(qwen2, dtype=dtype)
    for gamma in (3, 8, 64):
        for drafter in [*subject.scripted(), Branching(subject.texts, subject.vocab)]:
            subject.check(drafter, gamma)
        subject.check("ngram", gamma)
        subject.check(DraftModel(model=qwen2, dtype=dtype), gamma)
    subject.tally.assert_mixed()


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_kv_cache_dtypes(l2: Path, dtype: str, kv_cache_dtype: str) -> None:
    subject = Subject(l2, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    subject.check(None)
    for gamma in (3, 8):
        for drafter in [*subject.scripted(), Branching(subject.texts, subject.vocab)]:
            subject.check(drafter, gamma, threads=1 + gamma % 2)
        subject.check(DraftModel(model=l2, dtype=dtype), gamma, max_num_batched_tokens=64)
    # The draft model keeps its own as the target does; what it drafts changes no byte either.
    subject.check("ngram", 8, block_size=4, max_num_batched_tokens=7)
    subject.tally.assert_mixed()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_contexts_of_several_segments(l2: Path, dtype: str, kv_cache_dtype: str) -> None:
    # Attention sums up 512 positions at a time: prompts end before, at and far behind such a place.
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "max_model_len": 1200}
    subject = Subject(l2, lengths=(480, 500, 511, 512, 700, 1020, 3), **options)
    for threads in (1, 2, 3):
        subject.check(None, threads=threads, max_num_batched_tokens=100 * threads)
        for drafter in (
            HalfRight(subject.texts, subject.vocab),
            Branching(subject.texts, subject.vocab),
        ):
            subject.check(drafter, 8 * threads, threads=threads)
        subject.check(Oracle(subject.texts, subject.vocab), 8, batch=1, threads=threads)
    subject.tally.assert_mixed()


def test_sizes_of_pass_and_block(l2: Path, dtype: str) -> None:
    # Prefill in chunks of a few tokens beside rows that draft, and paths across blocks.
    subject = Subject(l2, dtype=dtype)
    for options in (
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 8, "block_size": 1},
        {"max_num_batched_tokens": 19, "block_size": 4},
        {"max_num_batched_tokens": 64, "block_size": 64},
        {"block_size": 3},
        {"block_size": 256},
    ):
        subject.check(None, **options)
        subject.check(Oracle(subject.texts, subject.vocab), 5, **options)
        subject.check(HalfRight(subject.texts, subject.vocab, 5), 8, **options)
        subject.check(Branching(subject.texts, subject.vocab), 12, **options)
        subject.check(DraftModel(model=l2, dtype=dtype), 4, **options)
        subject.check(NGram(prompt_lookup_min=1), 4, **options)
    subject.tally.assert_mixed()


def test_fewer_places_than_requests(l2: Path, dtype: str) -> None:
    subject = Subject(l2, dtype=dtype)
    for size in (1, 2, 3):
        subject.check(None, max_batch_size=size)
        subject.check(HalfRight(subject.texts, subject.vocab), 8, max_batch_size=size)
        subject.check(DraftModel(model=l2, dtype=dtype), 3, max_batch_size=size)
    # Room for the longest request and little else: the others wait for blocks.
    tight = specrt.plan(l2, dtype=dtype, max_model_len=160, max_batch_size=1).target_kv_cache
    subject.check(Branching(subject.texts, subject.vocab), 8, kv_cache_bytes=tight)
    subject.tally.assert_mixed()


def test_order_of_arrival(l2: Path) -> None:
    subject = Subject(l2)
    order = [3, 6, 0, 5, 1, 4, 2]
    half = HalfRight(subject.texts, subject.vocab)
    with Engine(l2, half, num_speculative_tokens=8, **subject.options) as engine:
        outputs = engine.generate(
            [subject.prompts[i] for i in order], [subject.params[i] for i in order]
        )
    assert_same(outputs, [subject.expected[i] for i in order], "order")
    subject.tally.add(outputs)
    subject.tally.assert_mixed()


def test_rows_with_and_without_drafts(l2: Path) -> None:
    # Even rows repeat what the drafter knows; it has nothing to say about odd ones.
    subject = Subject(l2)
    oracle = Oracle(subject.texts[::2], subject.vocab)
    for gamma in (1, 8, 64):
        outputs = subject.check(oracle, gamma)
        drafted = [output.metrics.drafted_tokens > 0 for output in outputs]
        assert drafted == [row % 2 == 0 for row in range(7)]
    subject.check(AlwaysWrong(subject.texts[1::2], subject.vocab), 2)
    subject.tally.assert_mixed()


def test_every_way_to_end_in_one_batch(l2: Path) -> None:
    prompts = [[10, 11, 12], [20, 21], [30 + i for i in range(40)], [7], [1, 2, 3, 4]]
    with Engine(l2, max_model_len=80, max_batch_size=5) as engine:
        ids = engine.generate(prompts[0], greedy(60)).token_ids
        stop = max(set(ids), key=ids.index)  # the one that comes last for the first time
        assert ids.index(stop) >= 5
        params = [
            greedy(60, stop_token_ids=[stop]),
            greedy(3),
            greedy(1000),  # 40 more tokens are all that the context takes
            greedy(30),
            greedy(70),
        ]
        expected = [engine.generate(p, one) for p, one in zip(prompts, params, strict=True)]
    assert [one.finish_reason for one in expected] == ["stop", *["length"] * 4]
    assert len(expected[2].token_ids) == 40
    texts = known(expected)
    # Row 3 has no drafts; row 4's first draft is 64 tokens long, and right.
    for drafter in (Oracle(texts[:3] + texts[4:], 256), Branching(texts[:3] + texts[4:], 256)):
        options: dict[str, Any] = {"num_speculative_tokens": 64, "check_invariants": True}
        with Engine(l2, drafter, max_model_len=80, max_batch_size=5, **options) as engine:
            outputs = engine.generate(prompts, params)
            solo = [engine.generate(p, one) for p, one in zip(prompts, params, strict=True)]
        assert_same(outputs, expected, type(drafter).__name__)
        assert_same(solo, expected, type(drafter).__name__)
        assert outputs[3].metrics.drafted_tokens == 0
        if isinstance(drafter, Oracle):
            assert outputs[4].metrics.acceptance_rate_per_position[:64] == [1.0] * 64
            assert outputs[0].metrics.rounds == outputs[2].metrics.rounds == 1


def test_seeded_rows_beside_unseeded_ones(l2: Path) -> None:
    prompts = [[40, 41, 42, 43]] * 4
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
    params = [SamplingParams(seed=one, **options) for one in (1, None, 2, None)]
    with Engine(l2, NGram(prompt_lookup_min=1), max_model_len=64, max_batch_size=4) as engine:
        mixed = engine.generate(prompts, params)
        again = engine.generate(prompts, params)
        for output in mixed:
            repeat = engine.generate(prompts[0], SamplingParams(seed=output.seed, **options))
            assert_same([repeat], [output], output.seed)
    assert_same([mixed[0], mixed[2]], [again[0], again[2]], "seeded")
    assert mixed[1].token_ids != again[1].token_ids
    assert len({tuple(one.token_ids) for one in mixed}) == 4


# The demo model, where activations and texts are those of a trained one.

CHATS = [
    "Write the numbers from one to twenty as words.",
    "Rename `x` to `y` and return only the code:\n\nx = 1\nx = x + 1\nprint(x)\nprint(x + x)\n",
    "Tell me a story about a fox.",
]


@pytest.fixture(scope="module", params=["demo_fp32", "demo_bf16"])
def demo(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def test_demo_model(demo: Path, demo_tokenizer: specrt.Tokenizer) -> None:
    params = [
        greedy(40, logprobs=2),
        greedy(40, temperature=0.7, top_p=0.9, seed=3, logprobs=2),
        greedy(40, temperature=1.0, top_k=50, min_p=0.02, seed=4),
    ]
    prompts = [
        demo_tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in CHATS
    ]

    def run(drafter: Any = None, *, solo: bool = False, **options: Any) -> list[RequestOutput]:
        sizes = {"max_model_len": 256, "max_batch_size": 3}
        with Engine(demo, drafter, tokenizer=demo_tokenizer, **sizes, **options) as engine:
            if solo:
                pairs = zip(prompts, params, strict=True)
                return [engine.generate(prompt, one) for prompt, one in pairs]
            return engine.generate(prompts, params)

    expected = run(threads=2)
    texts, vocab = known(expected), demo_tokenizer.vocab_size
    tally, later = Tally(), LaterSiblings()

    def check(drafter: Any, gamma: int, **options: Any) -> None:
        outputs = run(drafter, num_speculative_tokens=gamma, **options)
        assert_same(outputs, expected, (type(drafter).__name__, gamma, options))
        tally.add(outputs)

    check("ngram", 8, threads=1)
    check(NGram(prompt_lookup_min=1, prompt_lookup_max=3), 3, threads=2, solo=True)
    check(Oracle(texts, vocab), 64)
    check(HalfRight(texts, vocab), 8)
    check(HalfRight(texts, vocab, period=17), 64, max_num_batched_tokens=48, block_size=4)
    check(AlwaysWrong(texts, vocab), 1)
    check(later.watch(Branching(texts, vocab)), 8)
    check(later.watch(Branching(texts, vocab)), 64, threads=1)
    assert later.count(texts) >= 20
    tally.assert_mixed()
