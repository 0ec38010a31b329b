"""Heads crafted so that what becomes of each draft is known by arithmetic; heads in `Merge`.

The target counts modulo 16. Its hidden state behind the final norm is 4 times the one-hot of the
last token, and its output head says one more. A head that turns a one-hot by one each time counts
too; by two, or not at all, it is wrong from there on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import MTP_KINDS, Head, Tensors, write
from helpers import assert_same, greedy
from safetensors.torch import load_file
from test_medusa import REFERENCE
from test_medusa import write as write_medusa
from test_mtp import with_modules
from tiny import counter, tiny_llama

import specrt
from specrt import SamplingParams
from specrt.drafters import MTP, Eagle, Eagle3, Medusa, Merge, NGram

SIZE = 16
EYE = torch.eye(SIZE)


def silent_head(kind: str, **more: Any) -> Head:
    """A head whose layers add nothing and whose norms only scale."""
    head = Head(
        kind, hidden=SIZE, target_hidden=SIZE, heads=2, kv_heads=2, head_dim=8, ffn=SIZE,
        vocab=SIZE, eps=1e-30, **more,
    )  # fmt: skip
    for name, tensor in head.tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    return head


def turning_head(kind: str, turn: int = 1, *, by_token: int | None = None, **more: Any) -> Head:
    """Its state is the one it reads, turned by `turn`; or `by_token` from the token it reads."""
    head = silent_head(kind, **more)
    turned = EYE.roll(turn if by_token is None else by_token, 0)
    parts = [torch.zeros(SIZE, SIZE), turned]  # of the embedding, of the hidden state
    if by_token is not None:
        parts.reverse()
    if kind == "mimo":
        parts.reverse()
    head.tensors["fc.weight"] = torch.cat(parts, -1)
    return head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counter(tmp_path_factory.mktemp("target"))


def counts(folder: Path, spec: Any, tokens: int = 13, **options: Any) -> tuple[int, int, int]:
    """(drafted, accepted, rounds) of a greedy and of a sampled text."""
    found = set()
    for temperature in (0.0, 0.7):
        with specrt.Engine(folder, spec, policy="fixed", threads=1, **options) as engine:
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
            output = engine.generate([3, 4, 5], params)
        assert output.token_ids == [(6 + i) % SIZE for i in range(tokens)]
        one = output.metrics
        found.add((one.drafted_tokens, one.accepted_tokens, one.rounds))
    (result,) = found
    return result


@pytest.mark.parametrize("flags", [set(), {"fc_bias"}, {"embedding", "lm_head"}])
def test_eagle(flags: set[str], target: Path, tmp_path: Path) -> None:
    def eagle(name: str, **how: Any) -> Path:
        head = turning_head("eagle", flags=flags, **how)
        if "fc_bias" in flags:
            head.tensors["fc.bias"].zero_()
        if flags & {"embedding", "lm_head"}:
            tables = load_file(target / "model.safetensors")
            head.tensors["embed_tokens.weight"] = tables["model.embed_tokens.weight"]
            head.tensors["lm_head.weight"] = tables["lm_head.weight"]
        return write(tmp_path / name, head.config(), head.stored())

    # 1 + 3 * (3 + 1); the state of token t, turned, is that of t + 1, whose next is drafted.
    assert counts(target, Eagle(eagle("right"), num_speculative_tokens=3)) == (9, 9, 3)
    assert counts(target, Eagle(eagle("token", by_token=0), num_speculative_tokens=3)) == (9, 9, 3)
    # The concatenation the other way round would be these two: nothing is right.
    for name, how in (("late", {"turn": 2}), ("early", {"turn": 0}), ("after", {"by_token": 1})):
        drafted, accepted, rounds = counts(target, Eagle(eagle(name, **how)), 9)
        assert (accepted, rounds) == (0, 8), name
        assert drafted > 16
    # EAGLE-2: the right token is the best of each level, so the path is as deep as the tree.
    spec = Eagle(eagle("tree"), top_k=3, total_token=13, depth=3)
    assert counts(target, spec, 16) == (36, 12, 3)


def test_eagle3_reads_the_layers_that_it_names(tmp_path: Path) -> None:
    """A head that turns the first of three states: of other layers it makes nothing right."""
    target = tiny_llama(tmp_path / "target", layers=6, seed=9, lm_head_scale=4.0)
    head = Head("eagle3", seed=8)
    folder = write(tmp_path / "head", head.config(), head.stored())
    seen = {}
    for layers in ((2, 3, 4), (1, 2, 3), (3, 4, 5)):
        spec = Eagle3(folder, num_speculative_tokens=1, aux_layer_ids=layers)
        outputs = tuple(one - 1 for one in layers)
        other = Eagle3(
            folder, num_speculative_tokens=1, aux_layer_ids=outputs, aux_convention="output"
        )
        both = [counts_of(target, one) for one in (spec, other)]
        assert both[0] == both[1]
        seen[layers] = both[0]
    assert len(set(seen.values())) > 1


def counts_of(folder: Path, spec: Any) -> tuple[int, ...]:
    with specrt.Engine(folder, spec, policy="fixed", threads=1) as engine:
        output = engine.generate([list(range(5, 60, 3)), [1, 2]], greedy(60))
    return tuple(one.metrics.accepted_tokens for one in output)


def module_folder(path: Path, heads: list[Head], target: Path) -> Path:
    keys = {"mimo": "num_nextn_predict_layers", "deepseek": "num_nextn_predict_layers"}
    key = keys.get(heads[0].kind, "mtp_num_hidden_layers")
    for head in heads:
        if head.kind == "deepseek":  # theirs is behind the target's only layer
            head.flags.discard("lm_head")
    return with_modules(path, heads, target, first=1, **{key: len(heads)})


@pytest.mark.parametrize("kind", MTP_KINDS)
def test_mtp(kind: str, target: Path, tmp_path: Path) -> None:
    def run(name: str, turns: list[int | None], tokens: int = 3) -> tuple[int, int, int]:
        """`turns` of each module; None reads the token alone."""
        heads = [
            turning_head(kind, by_token=0) if turn is None else turning_head(kind, turn)
            for turn in turns
        ]
        folder = module_folder(tmp_path / name, heads, target)
        return counts(folder, MTP(num_speculative_tokens=tokens), 13)

    # One module, run again: 1 + 3 * (3 + 1).
    assert run("one", [1]) == (9, 9, 3)
    assert run("token", [None]) == (9, 9, 3)
    # Position 1 is wrong from the start: twelve rounds, of 3 drafts until the limit cuts them.
    assert run("late", [2]) == (30, 0, 12)
    if kind == "qwen3_next":  # its modules share all but layers that are silent here
        return
    # The k-th drafts the k-th token: where it is wrong, all behind it is.
    assert run("two", [1, 1]) == (9, 9, 3)
    assert run("three", [1, 1, 1], 5) == (10, 10, 2)
    assert run("tokens", [None, None, None], 5) == (10, 10, 2)
    assert run("mixed", [1, None, 1], 5) == (10, 10, 2)
    # 1 + 6 * (1 + 1); rounds with 12, 10, ... left draft 3, 3, 3, 3, 3, 1.
    assert run("second", [1, 2]) == (16, 6, 6)
    # 1 + 4 * (2 + 1): with 12, 9, 6, 3 left it drafts 3, 3, 3, 2.
    assert run("third", [1, 1, 2]) == (11, 8, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_as_its_own_drafter_on_the_demo_model(dtype: str, request: Any) -> None:
    demo = request.getfixturevalue("demo_fp32" if dtype == "float32" else "demo_bf16")
    prompts = [[1, 504, 3575, 282, 4649, 314], list(range(400, 430))]
    params = [greedy(16), SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=2)]
    sizes: dict[str, Any] = {"max_model_len": 64, "max_batch_size": 2}
    with specrt.Engine(demo, **sizes) as engine:
        expected = engine.generate(prompts, params)
    drafter = specrt.drafters.DraftModel(model=demo)
    with specrt.Engine(demo, drafter, policy="fixed", num_speculative_tokens=3, **sizes) as engine:
        outputs = engine.generate(prompts, params)
    assert_same(outputs, expected, dtype)
    for one in outputs:
        assert one.metrics.drafted_tokens == one.metrics.accepted_tokens > 8


# Heads in merged drafts.


def medusa_heads(path: Path, behind: int, heads: int = 3) -> Path:
    """Head i from 0 says last + i + `behind`: 2 is right."""
    tensors: dict[str, np.ndarray] = {}
    last = np.arange(SIZE)
    for i in range(heads):
        tensors[f"{i}.0.linear.weight"] = np.zeros((SIZE, SIZE), np.float32)
        tensors[f"{i}.0.linear.bias"] = np.full(SIZE, -60.0, np.float32)
        table = np.zeros((SIZE, SIZE), np.float32)
        table[(last + i + behind) % SIZE, last] = 8.0
        tensors[f"{i}.1.weight"] = table
    return write_medusa(path, tensors, REFERENCE)


def part(kind: str, path: Path, right: bool) -> Any:
    if kind == "medusa":
        return Medusa(model=medusa_heads(path, 2 if right else 3), tree="chain")
    head = turning_head("eagle", 1 if right else 2)
    return Eagle(write(path, head.config(), head.stored()), num_speculative_tokens=3)


@pytest.fixture(scope="module")
def deep_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counter with more layers that add nothing, beside which a head is cheap."""
    tensors = load_file(target / "model.safetensors")
    for name, tensor in list(tensors.items()):
        for layer in range(1, 24):
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = tensor
    raw = json.loads((target / "config.json").read_text())
    return write(tmp_path_factory.mktemp("deep"), {**raw, "num_hidden_layers": 24}, tensors)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_merge_goes_with_who_is_right(kind: str, deep_target: Path, tmp_path: Path) -> None:
    # A text of whole cycles, where the n-gram is right; and one that misleads it throughout: behind
    # each number comes one that the target does not say, and the output ends before it is whole.
    helpful = [*range(SIZE), *range(8)]
    misleading = [one for i in range(SIZE) for one in (i, (i + 5) % SIZE)]
    for right, prompt, tokens in ((True, misleading, 15), (False, helpful, 60)):
        spec = Merge([NGram(prompt_lookup_max=1), part(kind, tmp_path / f"{right}", right)])
        with specrt.Engine(deep_target, spec, num_speculative_tokens=3, threads=1) as engine:
            output = engine.generate(prompt, greedy(tokens))
        assert output.token_ids == [(prompt[-1] + 1 + i) % SIZE for i in range(tokens)]
        sources = output.metrics.sources
        best, other = (kind, "ngram") if right else ("ngram", kind)
        assert sources[best].accepted_tokens == output.metrics.accepted_tokens, sources
        assert sources[other].accepted_tokens == 0, sources
        # Who fails is soon given no place.
        assert sources[other].drafted_tokens < sources[best].drafted_tokens / 2, sources
        assert output.metrics.acceptance_length > 2, sources


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough that a head is worth asking."""
    return tiny_llama(tmp_path_factory.mktemp("random"), layers=24, seed=3, lm_head_scale=4.0)


def random_part(kind: str, path: Path, tree: bool) -> Any:
    if kind == "medusa":
        draw = np.random.default_rng(7)
        tensors: Tensors | dict[str, Any] = {}
        for i in range(3):
            tensors[f"{i}.0.linear.weight"] = draw.normal(0, 0.2, (64, 64)).astype(np.float32)
            tensors[f"{i}.0.linear.bias"] = draw.normal(0, 0.5, 64).astype(np.float32)
            tensors[f"{i}.1.weight"] = draw.normal(0, 0.5, (128, 64)).astype(np.float32)
        shape: Any = [[0], [1], [0, 0], [0, 1], [0, 0, 0]] if tree else "chain"
        return Medusa(model=write_medusa(path, tensors, REFERENCE), tree=shape)
    head = Head("eagle", seed=4)
    sizes = {"top_k": 3, "total_token": 9, "depth": 2} if tree else {"num_speculative_tokens": 3}
    return Eagle(write(path, head.config(), head.stored()), **sizes)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_merged_heads_change_no_text(
    kind: str, tree: bool, random_target: Path, tmp_path: Path
) -> None:
    phrase = [5, 9, 2, 77, 31, 8]
    prompts = [phrase * 3, [1], list(range(3, 40)), [8, 8, 8, 9], [100, 3, *phrase, 100]]
    params = [
        greedy(30),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=6, logprobs=2),
        SamplingParams(max_tokens=25, temperature=1.2, seed=7, repetition_penalty=1.3),
        greedy(22, repetition_penalty=50.0),
    ]
    spec = Merge([NGram(num_candidates=2), "suffix", random_part(kind, tmp_path, tree)])
    for dtype in ("float32", "bfloat16"):
        with specrt.Engine(random_target, dtype=dtype) as engine:
            expected = engine.generate(prompts, params)
        with specrt.Engine(
            random_target, spec, dtype=dtype, policy="fixed", check_invariants=True
        ) as engine:
            assert (
                engine.memory.drafter_weights
                == specrt.plan(random_target, spec, dtype=dtype).drafter_weights
            )
            assert_same(engine.generate(prompts, params), expected, (kind, tree, dtype))
            alone = [engine.generate(*one) for one in zip(prompts, params, strict=True)]
            assert_same(alone, expected, (kind, tree, dtype))
            head = sum(one.metrics.sources[kind].drafted_tokens for one in alone)
            lookups = sum(
                one.metrics.sources[name].drafted_tokens
                for one in alone
                for name in ("ngram", "suffix")
            )
        assert head > 0
        assert lookups > 0
