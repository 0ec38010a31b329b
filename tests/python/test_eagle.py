"""EAGLE heads: what they draft, against a restatement in PyTorch, and what comes out with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import Head, Restated, Tensors, paths, write
from helpers import assert_same, greedy
from tiny import counter, tiny_llama

import specrt
from specrt import SamplingParams, _core
from specrt.drafters import Eagle, Eagle3

PROMPTS = [[5, 9, 2, 77, 31], [1], list(range(3, 40)), [8, 8, 8, 9], [100, 3, 60, 61, 62, 63, 64]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=8, seed=3, lm_head_scale=4.0)


@pytest.fixture(scope="module")
def reference(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def watched(engine: specrt.Engine) -> list[tuple[list[int], dict[tuple[int, ...], float]]]:
    """Every draft that the engine makes from now on, with the tokens before it."""
    seen: list[Any] = []
    own = engine._drafter
    assert own is not None
    own._shared = _core.make_watched_drafter(
        own._shared, lambda tokens, tree: seen.append((tokens, paths(tree)))
    )
    return seen


def features_of(model: Any, tokens: list[int], layers: list[int]) -> torch.Tensor:
    """Inputs of these layers at all positions but the last; [] the final norm's output."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    if not layers:
        return states[-1][0, :-1]
    return torch.cat([states[one][0, :-1] for one in layers], -1)


LAYOUTS: dict[str, tuple[Head, dict[str, Any], dict[str, Any], list[int]]] = {
    # head, config beside its own, how tensors are stored, target layers (by whose input they go)
    "eagle": (Head("eagle", seed=1), {"bias": False}, {}, []),
    "eagle-bias": (Head("eagle", flags={"fc_bias"}, seed=2), {"bias": True}, {}, []),
    "eagle-bias-unsaid": (Head("eagle", flags={"fc_bias"}, seed=3), {}, {"pickled": True}, []),
    "eagle-own-tables": (
        Head("eagle", flags={"embedding", "lm_head"}, seed=4), {}, {"prefix": "model."}, [],
    ),
    "eagle-norms": (
        Head("eagle", flags={"first_norm", "final_norm", "qkv_bias"}, seed=5),
        {"attention_bias": True}, {}, [],
    ),
    "eagle-wide-heads": (Head("eagle", head_dim=32, heads=8, seed=6), {}, {}, []),
    "eagle-two-layers": (Head("eagle", layers=2, theta=500000.0, seed=7), {}, {}, []),
    "eagle3": (Head("eagle3", seed=11), {}, {}, [2, 4, 5]),
    "eagle3-d2t": (
        Head("eagle3", draft_vocab=40, flags={"norm_before_residual"}, seed=12), {}, {}, [2, 4, 5],
    ),
    "eagle3-vllm": (
        Head("eagle3", draft_vocab=40, seed=13), {},
        {"vllm": True, "midlayer": False, "prefix": "model."}, [2, 4, 5],
    ),
    "eagle3-named": (
        Head("eagle3", flags={"norm_output", "embedding"}, seed=14),
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7, 3],
                          "use_aux_hidden_state": True}}, {}, [0, 7, 3],
    ),
    "eagle3-part-norms": (
        Head("eagle3", flags={"part_norms", "norm_output"}, parts=2, seed=15),
        {"eagle_aux_hidden_state_layer_ids": [1, 6]}, {}, [1, 6],
    ),
    "eagle3-input-norm": (
        Head("eagle3", flags={"input_norm"}, seed=16), {}, {"pickled": True}, [2, 4, 5],
    ),
    "eagle3-nested-flags": (
        Head("eagle3", flags={"input_norm"}, parts=2, seed=17),
        {"norm_before_fc": None,
         "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [4, 2]}},
        {}, [4, 2],
    ),
    "eagle3-narrow": (
        Head("eagle3", hidden=32, head_dim=16, flags={"embedding", "lm_head"}, seed=18),
        {"target_hidden_size": 64}, {"midlayer": False}, [2, 4, 5],
    ),
    "eagle3-no-aux": (
        Head("eagle3", flags={"no_fc"}, seed=19),
        {"eagle_config": {"use_aux_hidden_state": False}}, {}, [],
    ),
    "eagle3-two-layers": (
        Head("eagle3", layers=2, flags={"qk_norm"}, seed=20), {}, {"midlayer": False}, [2, 4, 5],
    ),
    "eagle3-window": (
        Head("eagle3", window=4, seed=21),
        {"layer_types": ["sliding_attention"], "sliding_window": 4}, {}, [2, 4, 5],
    ),
}  # fmt: skip


def folder_of(path: Path, name: str) -> Path:
    head, config, storage, _ = LAYOUTS[name]
    pickled = storage.get("pickled", False)
    storage = {one: value for one, value in storage.items() if one != "pickled"}
    return write(path / name, head.config(**config), head.stored(**storage), pickled=pickled)


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_published_module(
    name: str, target: Path, reference: Any, tmp_path: Path
) -> None:
    head, _, _, layers = LAYOUTS[name]
    folder = folder_of(tmp_path, name)
    kind = Eagle3 if head.kind == "eagle3" else Eagle
    for spec in (
        kind(folder, num_speculative_tokens=4),
        kind(folder, total_token=12, depth=3, top_k=3),
    ):
        with specrt.Engine(
            target, spec, check_invariants=True, block_size=4, policy="fixed"
        ) as engine:
            seen = watched(engine)
            engine.generate(PROMPTS[0], greedy(8))
            engine.generate(PROMPTS[2], greedy(3))
        assert len(seen) >= 3
        restated = Restated(
            head, reference.model.embed_tokens.weight.detach(), reference.lm_head.weight.detach()
        )
        for tokens, tree in (seen[0], seen[-2], seen[-1]):
            levels = max(map(len, tree))
            nodes = min(spec.num_speculative_tokens or 0, len(tree))
            expected = restated.draft(
                tokens, features_of(reference, tokens, layers), nodes, levels, spec.top_k
            )
            assert tree.keys() == expected.keys()
            for path, value in expected.items():
                assert tree[path] == pytest.approx(value, abs=1e-4)


def test_speculators_format(target: Path, reference: Any, tmp_path: Path) -> None:
    head = Head("eagle3", draft_vocab=50, flags={"norm_before_residual"}, seed=30)
    inner = head.config()
    for key in ("architectures", "draft_vocab_size", "norm_before_residual"):
        del inner[key]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": 50,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
    }  # norm_before_residual is true where this format does not say
    folder = write(tmp_path / "head", config, head.stored(midlayer=False))
    with specrt.Engine(target, str(folder)) as engine:  # recognised
        assert engine.num_speculative_tokens == 4
        seen = watched(engine)
        engine.generate(PROMPTS[0], greedy(6))
    restated = Restated(
        head, reference.model.embed_tokens.weight.detach(), reference.lm_head.weight.detach()
    )
    tokens, tree = seen[0]
    expected = restated.draft(tokens, features_of(reference, tokens, [1, 4, 7]), 4, 4, 1)
    assert tree.keys() == expected.keys()
    assert all(tree[one] == pytest.approx(expected[one], abs=1e-4) for one in tree)


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["eagle-bias", "eagle3-d2t", "eagle3-window"])
def test_output_is_that_of_no_drafter(name: str, dtype: str, target: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, name)
    kind = Eagle3 if name.startswith("eagle3") else Eagle
    params = [
        greedy(24),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=20, seed=6, logprobs=2),
        SamplingParams(max_tokens=25, temperature=1.2, seed=7, repetition_penalty=1.3),
        greedy(22, frequency_penalty=0.7, logit_bias={3: -100.0}),
    ]
    with specrt.Engine(target, dtype=dtype) as plain:
        expected = plain.generate(PROMPTS, params)
    for spec in (kind(folder), kind(folder, top_k=3, total_token=20, depth=3)):
        drafted = 0
        with specrt.Engine(
            target, spec, dtype=dtype, check_invariants=True, block_size=4,
            max_num_batched_tokens=128, policy="fixed",
        ) as engine:  # fmt: skip
            assert_same(engine.generate(PROMPTS, params), expected, spec)
            for prompt, one, output in zip(PROMPTS, params, expected, strict=True):
                alone = engine.generate(prompt, one)
                assert_same([alone], [output], (spec, prompt))
                drafted += alone.metrics.drafted_tokens
        assert drafted > 50


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_trees_go_with_the_other_verifications(
    verification: str, target: Path, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "eagle3-d2t")
    spec = Eagle3(folder, top_k=3, total_token=10, depth=2)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    texts = []
    for _ in range(2):
        with specrt.Engine(
            target, spec, verification=verification, max_batch_size=8, policy="fixed"
        ) as engine:
            outputs = engine.generate(PROMPTS, params)
            assert sum(one.metrics.drafted_tokens for one in outputs) > 50
            texts.append([one.token_ids for one in outputs])
            alone = engine.generate(PROMPTS[2], params)
            assert alone.token_ids == texts[0][2]
    assert texts[0] == texts[1]


def echo_head(**more: Any) -> Head:
    """For the counting target: its state moves on by one token in each pass, attention or no.

    fc takes the first hidden state, a one-hot of the last token; the MLP turns it by one.
    """
    size = 16
    head = Head(
        "eagle3", hidden=size, target_hidden=size, heads=2, kv_heads=1, head_dim=8, ffn=size,
        vocab=size, **more,
    )  # fmt: skip
    t, eye = head.tensors, torch.eye(size)
    turned = eye.roll(1, 0)
    for name in t:
        if name.endswith("norm.weight"):
            t[name] = torch.ones_like(t[name])
    t["fc.weight"] = torch.cat([eye, torch.zeros(size, 2 * size)], -1)
    t["layers.0.self_attn.o_proj.weight"] *= 0.0
    # RMSNorm makes 4 of the one: silu(40) * up = 1.
    t["layers.0.mlp.gate_proj.weight"] = 10.0 * eye
    t["layers.0.mlp.up_proj.weight"] = eye / 160.0
    t["layers.0.mlp.down_proj.weight"] = turned - eye
    return head


def test_a_head_that_knows_is_always_accepted(tmp_path: Path) -> None:
    target = counter(tmp_path / "target")
    head = echo_head()
    folder = write(tmp_path / "head", head.config(), head.stored())
    layers = (1, 1, 1)
    for spec in (
        Eagle3(folder, num_speculative_tokens=3, aux_layer_ids=layers),
        Eagle3(folder, num_speculative_tokens=3, aux_layer_ids=(0, 0, 0), aux_convention="output"),
    ):
        with specrt.Engine(target, spec, policy="fixed") as engine:
            metrics = engine.generate([3, 4, 5], greedy(13)).metrics
            assert (metrics.drafted_tokens, metrics.accepted_tokens, metrics.rounds) == (9, 9, 3)
    # Traps, sprung on purpose: the state fed back is the one before the final norm, and the
    # residual stream starts from the state before its norm. A one-hot that was normed is four times
    # as large, and the MLP's step no longer turns it: then the second draft is wrong, or all are.
    for flag, numbers in (("norm_output", (16, 6, 6)), ("norm_before_residual", (30, 0, 12))):
        folder = write(tmp_path / flag, head.config(**{flag: True}), head.stored())
        spec = Eagle3(folder, num_speculative_tokens=3, aux_layer_ids=layers)
        with specrt.Engine(target, spec, policy="fixed") as engine:
            metrics = engine.generate([3, 4, 5], greedy(13)).metrics
            assert (
                metrics.drafted_tokens,
                metrics.accepted_tokens,
                metrics.rounds,
            ) == numbers, flag
    # With a map of another order of ids the same drafts are other tokens.
    head = echo_head(draft_vocab=8)
    head.tensors["d2t"] = torch.arange(8)  # the even tokens: d + d2t[d] = 2 d
    head.tensors["t2d"] = torch.arange(16) % 2 == 0
    head.tensors["lm_head.weight"] = 10.0 * torch.eye(16).roll(1, 0)[::2]
    folder = write(tmp_path / "half", head.config(), head.stored())
    with specrt.Engine(
        target, Eagle3(folder, num_speculative_tokens=1, aux_layer_ids=layers), policy="fixed"
    ) as engine:
        seen = watched(engine)
        metrics = engine.generate([2, 3], greedy(12)).metrics
        # 4 comes from the prompt; the draft behind it cannot be 5, all others are right.
        assert (metrics.drafted_tokens, metrics.accepted_tokens, metrics.rounds) == (6, 5, 6)
    assert all(token % 2 == 0 for _, tree in seen for (token,) in tree)
    # Only where the next token is even is it right: after odd ones.
    assert all(list(tree) == [((tokens[-1] + 1) % 16,)] for tokens, tree in seen if tokens[-1] % 2)


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
def test_acceptance_is_the_same_out_of_the_prefix_cache(target: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "eagle-bias")
    shared = [int(one) for one in torch.randint(0, 128, (64,), generator=torch.manual_seed(1))]
    with specrt.Engine(
        target, Eagle(folder, num_speculative_tokens=3), block_size=4, check_invariants=True
    ) as engine:
        seen = watched(engine)
        cold = engine.generate([*shared, 7], greedy(20))
        drafts = list(seen)
        seen.clear()
        warm = engine.generate([*shared, 7], greedy(20))
        assert warm.metrics.cached_prompt_tokens >= 64 - 2 * 4
        assert warm.token_ids == cold.token_ids
        assert [one[1].keys() for one in seen] == [one[1].keys() for one in drafts]
        assert warm.metrics.accepted_tokens == cold.metrics.accepted_tokens
        # The next turn finds prompt and answer, less what was run last.
        turn = [*shared, 7, *cold.token_ids]
        again = engine.generate([*turn, 4, 5], greedy(5))
        assert again.metrics.cached_prompt_tokens >= len(turn) - 2 * 4
        # Another first token is another prompt, for the head as well.
        seen.clear()
        other = engine.generate([9, *shared[1:], 7], greedy(4))
        assert other.metrics.cached_prompt_tokens == 0


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
def test_drafting_ends_with_the_heads_positions(target: Path, tmp_path: Path) -> None:
    head = LAYOUTS["eagle3"][0]
    folder = write(tmp_path / "head", head.config(max_position_embeddings=32), head.stored())
    with specrt.Engine(target) as plain:
        expected = plain.generate([PROMPTS[0], list(range(1, 60))], greedy(60))
    with specrt.Engine(target, str(folder), check_invariants=True) as engine:
        seen = watched(engine)
        outputs = engine.generate([PROMPTS[0], list(range(1, 60))], greedy(60))
        assert_same(outputs, expected, "short head")
        # Position i has the token behind it, so 32 positions serve 33 tokens.
        assert all(tree for tokens, tree in seen if len(tokens) < 33)
        assert not any(tree for tokens, tree in seen if len(tokens) > 33)
        assert outputs[1].metrics.drafted_tokens == 0


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
@pytest.mark.parametrize(
    "spec",
    [{"num_speculative_tokens": 1}, {"top_k": 4, "total_token": 9, "depth": 0}, {"top_k": 2}],
)
def test_plans_are_exact(spec: dict[str, Any], target: Path, tmp_path: Path) -> None:
    for name in ("eagle3-d2t", "eagle3-part-norms", "eagle-own-tables"):
        drafter = (Eagle3 if "3" in name else Eagle)(folder_of(tmp_path, name), **spec)
        for dtype in ("float32", "bfloat16"):
            settings: dict[str, Any] = {"dtype": dtype, "max_batch_size": 4, "max_model_len": 256}
            planned = specrt.plan(target, drafter, **settings)
            with specrt.Engine(target, drafter, **settings) as engine:
                assert engine.memory == planned
                engine.generate(PROMPTS[:4], greedy(10))
                assert engine.memory == planned
        budget = planned.kv_cache - 1
        assert specrt.plan(target, drafter, kv_cache_bytes=budget, **settings).kv_cache <= budget


def broken(change: Any) -> tuple[dict[str, Any], Tensors]:
    head = Head("eagle3", draft_vocab=40, seed=41)
    config, tensors = head.config(), head.stored()
    change(config, tensors)
    return config, tensors


REFUSALS: dict[str, tuple[Any, str]] = {
    "missing": (lambda c, t: t.pop("midlayer.mlp.up_proj.weight"), "midlayer|up_proj|mlp.up"),
    "renamed": (
        lambda c, t: t.update({"midlayer.mlp.upp.weight": t["norm.weight"]}), "midlayer.mlp.upp",
    ),
    "absolute d2t": (lambda c, t: t.update(d2t=t["d2t"] + torch.arange(40)), "absolute ids"),
    "falling d2t": (lambda c, t: t.update(d2t=t["d2t"].flip(0)), "d2t"),
    "no d2t": (lambda c, t: (t.pop("d2t"), t.pop("t2d")), "d2t"),
    "other t2d": (lambda c, t: t.update(t2d=~t["t2d"]), "t2d"),
    "draft vocabulary": (lambda c, t: c.update(draft_vocab_size=41), "draft_vocab_size"),
    "other vocabulary": (lambda c, t: c.update(vocab_size=500), "vocab_size"),
    "other target": (lambda c, t: c.update(target_hidden_size=32), "target_hidden_size"),
    "quantised": (lambda c, t: c.update(quantization_config={"bits": 4}), "quantization_config"),
    "rope": (
        lambda c, t: c.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type",
    ),
    "unknown key": (lambda c, t: c.update(residual_gate="yes"), "residual_gate"),
    "unknown nested key": (
        lambda c, t: c.update(eagle_config={"attention_kind": "odd"}), "attention_kind",
    ),
    "parallel": (lambda c, t: c.update(parallel_drafting=True), "parallel_drafting"),
    "layer ids": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "0 to 8",
    ),
    "number of layers": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2]), "2 hidden states",
    ),
    "all layers": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=list(range(8))), "8 hidden states",
    ),
    "biases": (lambda c, t: c.update(attention_bias=True), "attention_bias"),
    "norm": (lambda c, t: c.update(fc_norm=True), "part_norms"),
    "twice": (
        lambda c, t: t.update({"layers.0.mlp.up_proj.weight": t["midlayer.mlp.up_proj.weight"]}),
        "one tensor",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*does not name the target's layers")
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_exactly_a_head_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    change, message = REFUSALS[case]
    config, tensors = broken(change)
    folder = write(tmp_path / "head", config, tensors)
    with pytest.raises(specrt.errors.LoadError, match=message):
        specrt.Engine(target, Eagle3(folder))


def test_kinds_and_options_are_checked(target: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the input of layers \[2, 4, 5\]"):
        specrt.plan(target, Eagle3(folder_of(tmp_path, "eagle3")))
    with pytest.raises(specrt.errors.LoadError, match=r"use specrt\.drafters\.Eagle3"):
        specrt.Engine(target, Eagle(folder_of(tmp_path, "eagle3")))
    with pytest.raises(specrt.errors.LoadError, match=r"use specrt\.drafters\.Eagle$"):
        specrt.Engine(target, Eagle3(folder_of(tmp_path, "eagle")))
    for name, kind in (("eagle", Eagle), ("eagle3-vllm", Eagle3), ("eagle-bias-unsaid", Eagle)):
        assert type(specrt.drafters.resolve(folder_of(tmp_path, name))) is kind
    assert isinstance(specrt.drafters.resolve(target), specrt.drafters.DraftModel)
    for options, message in (
        ({"top_k": 0}, "top_k"),
        ({"top_k": 65}, "top_k"),
        ({"depth": -1}, "depth"),
        ({"total_token": 1}, "total_token"),
        ({"total_token": 9, "num_speculative_tokens": 9}, "total_token"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
    ):
        with pytest.raises(specrt.errors.InvalidArgumentError, match=message):
            Eagle("x/y", **options)
    with pytest.raises(specrt.errors.InvalidArgumentError, match="aux_convention"):
        Eagle3("x/y", aux_convention="middle")  # type: ignore[arg-type]
    with pytest.raises(specrt.errors.InvalidArgumentError, match="0 to 7"):
        specrt.Engine(
            target,
            Eagle3(folder_of(tmp_path, "eagle3"), aux_layer_ids=(1, 2, 8), aux_convention="output"),
        )
    assert Eagle("x/y", depth=5).num_speculative_tokens == 6
    assert Eagle("x/y", top_k=10).num_speculative_tokens == 59
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specrt.plan(target, Eagle3(folder_of(tmp_path, "eagle3"), aux_layer_ids=(1, 2, 8)))
