"""Every kind of drafter, each under the same odd conditions: the text is that of none at all."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from draft_heads import Head, Tensors, write
from helpers import assert_same, greedy
from safetensors.torch import load_file
from test_medusa import REFERENCE, random_heads
from test_medusa import write as write_medusa
from test_mtp import module, with_modules

import specrt
from specrt import (
    DraftTree,
    Engine,
    InvalidArgumentError,
    SamplingParams,
    Speculation,
    StructuredOutputs,
)
from specrt.drafters import MTP, DraftModel, Eagle, Eagle3, Medusa, Merge, NGram, SelfDraft, Suffix

VOCAB = 264
KINDS = (
    "ngram", "suffix", "model", "rounded", "layers", "eagle", "eagle3", "mtp", "mtp-tree", "medusa",
    "merge", "own",
)  # fmt: skip


class Scatter(specrt.Drafter):
    """Trees of no meaning, as large as may be and larger, with the right token now and then."""

    num_speculative_tokens = 6

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        draw = np.random.default_rng(tokens)
        count = int(draw.integers(0, 2 * budget + 2))
        parents = [int(draw.integers(-1, i)) for i in range(count)]
        taken: set[tuple[int, int]] = set()
        ids = []
        for parent in parents:
            token = int(draw.integers(VOCAB))
            while (parent, token) in taken:
                token = (token + 1) % VOCAB
            taken.add((parent, token))
            ids.append(token)
        tokens.clear()  # a copy, whatever is done to it
        return DraftTree(ids, parents)


class Drafters:
    """A target and its drafters; `spoil` is done to the tensors of what has any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        base = tiny.tiny_llama(
            path / "base", layers=4, vocab=VOCAB, lm_head_scale=4.0, seed=2, eos_token_id=257
        )
        self.target = self.with_modules("target", base)

    def with_modules(self, name: str, base: Path, spoil: Any = None) -> Path:
        flags = {"embedding", "lm_head"}
        heads = [module("deepseek", seed=60 + k, vocab=VOCAB, flags=flags) for k in range(2)]
        for head in heads if spoil is not None else []:
            spoil(head.tensors)
        more = {"num_nextn_predict_layers": 2}
        return tiny.byte_tokenizer(with_modules(self.path / name, heads, base, first=4, **more))

    def make(self, kind: str, spoil: Any = None) -> tuple[Path, Any]:
        """(the target, the drafter)."""
        name = kind if spoil is None else f"{kind}-{spoil.__name__}"
        folder, target = self.path / name, self.target

        def spoilt(tensors: Tensors) -> Tensors:
            if spoil is not None:
                spoil(tensors)
            return tensors

        if kind == "model":
            base = self.path / "base"
            tensors = load_file(base / "model.safetensors")
            draw = torch.manual_seed(5)
            for one, tensor in tensors.items():
                if one.endswith("proj.weight"):
                    tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=draw)
            write(folder, json.loads((base / "config.json").read_text()), spoilt(tensors))
            return target, DraftModel(model=tiny.byte_tokenizer(folder))
        if kind in ("eagle", "merge"):
            head = Head("eagle", vocab=VOCAB, seed=61)
            write(folder, head.config(), spoilt(head.stored()))
            if kind == "eagle":
                return target, Eagle(folder, top_k=2, total_token=8, depth=2)
            own = Eagle(folder, num_speculative_tokens=2)
            return target, Merge([NGram(), Suffix(), own], num_speculative_tokens=5)
        if kind == "eagle3":
            head = Head("eagle3", vocab=VOCAB, draft_vocab=100, seed=62)
            write(folder, head.config(), spoilt(head.stored()))
            return target, Eagle3(folder, aux_layer_ids=(1, 2, 3))
        if kind in ("mtp", "mtp-tree"):
            if spoil is not None:
                target = self.with_modules(name, self.path / "base", spoil)
            return target, MTP() if kind == "mtp" else MTP(top_k=3, total_token=8, depth=2)
        if kind == "medusa":
            random = {one: torch.from_numpy(t) for one, t in random_heads(3).items()}
            plain = {one: t.numpy() for one, t in spoilt(random).items()}
            return target, Medusa(model=write_medusa(folder, plain, REFERENCE))
        assert spoil is None
        return target, {
            "ngram": NGram(num_candidates=2),
            "suffix": Suffix(suffix_decoding_use_tree_spec=True),
            "rounded": SelfDraft(precision="int4"),
            "layers": SelfDraft(layers=2),
            "own": Scatter(),
        }[kind]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


SHARED = [5, 6, 7, 8, 9, 10, 11, 12]
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([7], greedy(1)),
    ([7], greedy(30)),
    ([*SHARED, 5, 6, 7, 8], greedy(24, logprobs=1)),
    ([*SHARED, 5, 6], greedy(24, speculation=Speculation(num_speculative_tokens=0))),
    ([*SHARED, 5], greedy(20, speculation=Speculation(num_speculative_tokens=1))),
    (SHARED, SamplingParams(max_tokens=22, temperature=0.9, seed=1)),
    (SHARED * 3, SamplingParams(max_tokens=20, temperature=1.1, seed=2, n=2, logprobs=0)),
    ([9] * 20, greedy(25, speculation=Speculation(policy="fixed"), repetition_penalty=1.2)),
    ([40, 41] * 4, greedy(25, speculation=Speculation(policy="goodput"))),
    ([60], SamplingParams(max_tokens=30, temperature=1.0, seed=3, stop=["e", "\x80", "z"])),
    ([1, 2], SamplingParams(max_tokens=2, temperature=0.8, seed=4, min_tokens=2)),
    ([3], greedy(20, structured_outputs=StructuredOutputs(regex="[a-f ]+x"))),
    ([3, 4], greedy(20, bad_words=["a", "b"], speculation=Speculation(policy="ema_tiers"))),
    (list(range(60, 85)), greedy(20, speculation=Speculation(policy="off"))),
]
OPTIONS: dict[str, Any] = {
    "max_model_len": 64, "max_batch_size": 4, "block_size": 4, "threads": 1, "self_test": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(drafters: Drafters) -> list[Any]:
    params = [replace(one, speculation=None) for _, one in REQUESTS]
    with Engine(drafters.target, **OPTIONS) as engine:
        return engine.generate([prompt for prompt, _ in REQUESTS], params)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_everything_where_the_cache_runs_full(
    kind: str, drafters: Drafters, expected: list[Any]
) -> None:
    target, drafter = drafters.make(kind)
    prompts, params = [one for one, _ in REQUESTS], [one for _, one in REQUESTS]
    one, two = (
        specrt.plan(target, drafter, max_batch_size=n, max_model_len=64, block_size=4).kv_cache
        for n in (1, 2)
    )
    room = (two - one) // 64 * (24 + 96)  # drafts, and half as much again as the longest text
    with Engine(
        target, drafter, max_num_batched_tokens=24, check_invariants=True,
        kv_cache_bytes=room, **OPTIONS,
    ) as engine:  # fmt: skip
        engine._scheduler._reserve = 2  # tokens of room, with which a request is let in
        decoder = engine._decoder
        assert decoder is not None
        free = decoder.free_kv_tokens
        preempted = drafted = cached = 0
        for _ in range(2):  # out of the prefix cache the second time
            outputs = engine.generate(prompts, params)
            assert_same(outputs, expected, kind)
            every = [one.metrics for output in outputs for one in output.outputs]
            preempted += sum(one.preemptions for one in every)
            drafted += sum(one.drafted_tokens for one in every)
            cached += sum(one.cached_prompt_tokens for one in every)
            assert outputs[0].metrics.drafted_tokens == outputs[0].metrics.rounds == 0
            assert outputs[3].metrics.drafted_tokens == outputs[13].metrics.drafted_tokens == 0
            assert outputs[4].metrics.drafted_tokens <= outputs[4].metrics.rounds
            assert decoder.free_kv_tokens == free
    assert preempted > 1
    assert drafted > 50
    assert cached > 20


@pytest.mark.parametrize("kind", KINDS)
def test_hits_and_drafts_out_of_the_prefix_cache(kind: str, drafters: Drafters) -> None:
    target, drafter = drafters.make(kind)
    prompt = ([20, 21, 22, 23, 24, 25, 26, 27, 28] * 8)[:64]
    options: dict[str, Any] = {**OPTIONS, "max_model_len": 160, "policy": "fixed"}
    with Engine(target, drafter, enable_prefix_caching=False, **options) as engine:
        cold = engine.generate(prompt, greedy(20))
    with Engine(target, drafter, check_invariants=True, **options) as engine:
        first, second = (engine.generate(prompt, greedy(20)) for _ in range(2))
        turn = engine.generate([*prompt, *cold.token_ids, 4, 5], greedy(4))
    assert_same([first, second], [cold, cold], kind)
    assert (first.metrics.cached_prompt_tokens, cold.metrics.cached_prompt_tokens) == (0, 0)
    assert second.metrics.cached_prompt_tokens >= 64 - 2 * 4
    assert turn.metrics.cached_prompt_tokens >= 84 - 2 * 4
    for one in (first, second):
        if one is second and kind in ("suffix", "merge"):
            continue  # these have learned the answer
        assert one.metrics.drafted_per_position == cold.metrics.drafted_per_position
        assert one.metrics.accepted_per_position == cold.metrics.accepted_per_position


@pytest.mark.parametrize("kind", KINDS)
def test_to_the_end_of_the_context(kind: str, drafters: Drafters) -> None:
    target, drafter = drafters.make(kind)
    options = {**OPTIONS, "max_model_len": 24}
    prompts = [[7], [7, 8], [5] * 20, list(range(22)), list(range(23))]
    params = [greedy(24 - len(one), ignore_eos=True) for one in prompts]
    with Engine(target, **options) as plain:
        expected = plain.generate(prompts, params)
        assert [len(one.token_ids) for one in expected] == [23, 22, 4, 2, 1]
    for gamma in (None, 1, 100):
        with Engine(
            target, drafter, num_speculative_tokens=gamma, policy="fixed", check_invariants=True,
            **options,
        ) as engine:  # fmt: skip
            assert_same(engine.generate(prompts, params), expected, (kind, gamma))


def none(tensors: Tensors) -> None:
    """Every number of the last layer's output is NaN."""
    for name, tensor in tensors.items():
        if name.endswith(("down_proj.weight", ".linear.weight")):
            tensor.fill_(float("nan"))


def huge(tensors: Tensors) -> None:
    """Sums overflow."""
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or ".linear" in name or name.endswith("fc.weight"):
            tensor.mul_(1e30)


@pytest.mark.parametrize("kind", KINDS)
def test_few_draft_tokens(kind: str, drafters: Drafters, expected: list[Any]) -> None:
    """Down to one, or refused by name where the drafter's shape says more."""
    target, drafter = drafters.make(kind)
    for gamma in (1, 2):
        try:
            engine = Engine(target, drafter, num_speculative_tokens=gamma, **OPTIONS)
        except InvalidArgumentError as error:
            assert "num_speculative_tokens" in str(error)  # noqa: PT017
            continue
        with engine:
            outputs = [engine.generate(*REQUESTS[row]) for row in (1, 2, 5, 7)]
        assert_same(outputs, [expected[row] for row in (1, 2, 5, 7)], (kind, gamma))
        metrics = outputs[0].metrics
        assert metrics.drafted_tokens <= gamma * metrics.rounds


@pytest.mark.parametrize("spoil", [none, huge])
@pytest.mark.parametrize("kind", ["model", "eagle", "eagle3", "mtp", "mtp-tree", "medusa", "merge"])
def test_weights_gone_bad(kind: str, spoil: Any, drafters: Drafters, expected: list[Any]) -> None:
    target, drafter = drafters.make(kind, spoil)
    prompts, params = [one for one, _ in REQUESTS], [one for _, one in REQUESTS]
    sampled = SamplingParams(
        max_tokens=12, temperature=1.0, seed=1, speculation=Speculation(verification="rejection")
    )
    with Engine(target, drafter, check_invariants=True, **OPTIONS) as engine:
        assert_same(engine.generate(prompts, params), expected, kind)
        assert len(engine.generate([7], sampled).token_ids) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_threads(kind: str, drafters: Drafters, expected: list[Any]) -> None:
    target, drafter = drafters.make(kind)
    wrong: list[Any] = []
    with Engine(target, drafter, **OPTIONS) as engine:

        def work(first: int) -> None:
            for row in range(first, len(REQUESTS), 3):
                output = engine.generate(*REQUESTS[row])
                try:
                    assert_same([output], [expected[row]], (kind, row))
                except AssertionError as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not wrong
