"""Multi-token prediction modules inside a target's checkpoint, one or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import Chained, Head, Restated, Tensors, paths, write
from helpers import assert_same, greedy
from safetensors.torch import load_file
from tiny import tiny_llama, tiny_qwen2

import specrt
from specrt import SamplingParams, _core
from specrt.drafters import MTP

PROMPTS = [[5, 9, 2, 77, 31], [1], list(range(3, 40)), [8, 8, 8, 9], [100, 3, 60, 61]]

# Plain name -> the family's, behind the module's prefix.
_NAMES = {
    "mimo": {
        "embedding_norm": "token_layernorm.weight", "hidden_norm": "hidden_layernorm.weight",
        "fc.weight": "input_proj.weight", "norm.weight": "final_layernorm.weight",
    },
    "qwen3_next": {
        "embedding_norm": "pre_fc_norm_embedding.weight",
        "hidden_norm": "pre_fc_norm_hidden.weight", "fc.weight": "fc.weight",
        "norm.weight": "norm.weight",
    },
    "deepseek": {
        "embedding_norm": "enorm.weight", "hidden_norm": "hnorm.weight",
        "fc.weight": "eh_proj.weight", "norm.weight": "shared_head.norm.weight",
        "embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight",
    },
}  # fmt: skip
_PREFIX = {
    "mimo": lambda index: f"model.mtp_layers.{index}.",
    "qwen3_next": lambda _: "mtp.",
    "deepseek": lambda index: f"model.layers.{index}.",
}


def module(kind: str, **more: Any) -> Head:
    """A random module that fits the targets below."""
    return Head(kind, ffn=128, eps=1e-6, **more)


def stored(head: Head, index: int = 0, first: int = 3) -> Tensors:
    """The tensors of a module, by its place among several, as its family names them.

    DeepSeek's go on where the target's layers end, at `first`.
    """
    if head.kind == "deepseek":
        index += first
    out = {}
    for name, tensor in head.tensors.items():
        if name.startswith("layers.0."):
            one = name.removeprefix("layers.0.")
            if head.kind == "qwen3_next":
                one = f"layers.{index}.{one}"
        else:
            one = _NAMES[head.kind][name]
        if head.kind == "qwen3_next" and tensor.ndim == 1 and "bias" not in name:
            tensor = tensor - 1.0
        out[_PREFIX[head.kind](index) + one] = tensor
    return out


def with_modules(path: Path, heads: list[Head], base: Path, first: int = 3, **config: Any) -> Path:
    """A copy of the target `base` with the modules beside it."""
    raw = {**json.loads((base / "config.json").read_text()), **config}
    tensors = load_file(base / "model.safetensors")
    for index, head in enumerate(heads):
        tensors.update(stored(head, index, first))
    return write(path, raw, tensors)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=3, seed=5, lm_head_scale=4.0)


def target_of(kind: str, head: Head | list[Head], llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(the target with its modules, the same as transformers can read it)."""
    heads = head if isinstance(head, list) else [head]
    if kind != "mimo":
        keys = {"qwen3_next": "mtp_num_hidden_layers", "deepseek": "num_nextn_predict_layers"}
        return with_modules(tmp_path / kind, heads, llama, **{keys[kind]: len(heads)}), llama
    base = tiny_qwen2(tmp_path / "qwen2", vocab=128, tie=False, layers=3, lm_head_scale=4.0)
    mimo = with_modules(
        tmp_path / kind, heads, base, num_nextn_predict_layers=len(heads), model_type="mimo",
        architectures=["MiMoForCausalLM"],
    )  # fmt: skip
    return mimo, base


HEADS = {
    "mimo": {"flags": {"qkv_bias"}, "theta": 1e6},
    "qwen3_next": {},
    "deepseek": {"flags": {"embedding", "lm_head"}},
}


def modules(kind: str, count: int, seed: int) -> list[Head]:
    """Different ones; those of Qwen3-Next's naming share all but their layers."""
    heads = [module(kind, seed=seed + k, **HEADS[kind]) for k in range(count)]
    if kind == "qwen3_next":
        for head in heads[1:]:
            head.tensors = {
                one: tensor if one.startswith("layers.") else heads[0].tensors[one]
                for one, tensor in head.tensors.items()
            }
    return heads


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_those_of_the_published_modules(
    kind: str, count: int, llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    heads = modules(kind, count, 50)
    folder, plain = target_of(kind, heads, llama, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tables = (reference.model.embed_tokens.weight.detach(), reference.lm_head.weight.detach())
    each = [Restated(head, *tables) for head in heads]
    restated = each[0] if count == 1 else Chained(each)
    specs = (MTP(), MTP(num_speculative_tokens=5), MTP(top_k=3, total_token=14, depth=3))
    for spec in specs:
        with specrt.Engine(
            folder, spec, block_size=4, check_invariants=True, policy="fixed"
        ) as engine:
            seen: list[Any] = []
            own = engine._drafter
            assert own is not None
            own._shared = _core.make_watched_drafter(
                own._shared,
                lambda tokens, tree: seen.append((tokens, paths(tree))),  # noqa: B023
            )
            engine.generate(PROMPTS[0], greedy(8))
        for tokens, tree in (seen[0], seen[-2]):
            assert len(tree) > 0
            with torch.no_grad():
                states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            expected = restated.draft(
                tokens, states[-1][0, :-1], len(tree), max(map(len, tree), default=1), spec.top_k
            )
            assert tree.keys() == expected.keys()
            for path, value in expected.items():
                assert tree[path] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        *((kind, dtype, 1) for kind in HEADS for dtype in ("float32", "bfloat16")),
        ("mimo", "bfloat16", 2),
        ("qwen3_next", "float32", 2),
        ("deepseek", "float32", 3),
    ],
)
def test_output_is_that_of_no_drafter(
    kind: str, dtype: str, count: int, llama: Path, tmp_path: Path
) -> None:
    folder, plain = target_of(kind, modules(kind, count, 51), llama, tmp_path)
    params = [
        greedy(24),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=6, logprobs=2),
        SamplingParams(max_tokens=25, temperature=1.2, seed=7, repetition_penalty=1.3),
        greedy(22, repetition_penalty=50.0),
    ]
    with specrt.Engine(plain, dtype=dtype) as engine:
        expected = engine.generate(PROMPTS, params)
    for spec in ("mtp", MTP(num_speculative_tokens=8), MTP(top_k=3, total_token=12, depth=3)):
        with specrt.Engine(
            folder, spec, dtype=dtype, check_invariants=True, policy="fixed"
        ) as engine:
            assert engine.memory == specrt.plan(folder, spec, dtype=dtype)
            outputs = engine.generate(PROMPTS, params)
            assert_same(outputs, expected, (kind, spec))
            assert sum(one.metrics.drafted_tokens for one in outputs) > 30
            assert_same([engine.generate(PROMPTS[1], params[1])], expected[1:2], (kind, spec))


@pytest.mark.parametrize(("kind", "count"), [("mimo", 1), ("qwen3_next", 2), ("deepseek", 3)])
def test_as_many_tokens_as_modules_unless_more_are_asked_for(
    kind: str, count: int, llama: Path, tmp_path: Path
) -> None:
    folder, _ = target_of(kind, modules(kind, count, 57), llama, tmp_path)
    deep = {"num_speculative_tokens": 5}

    def drafts(spec: Any, **options: Any) -> tuple[int, int, int, int]:
        """Tokens a round; nodes and depth of the largest draft; bytes of weights."""
        sizes, depths = {0}, {0}
        with specrt.Engine(folder, spec, policy="fixed", **options) as engine:
            assert engine.memory == specrt.plan(folder, spec, **options)
            own = engine._drafter
            assert own is not None
            own._shared = _core.make_watched_drafter(
                own._shared,
                lambda _, tree: (sizes.add(len(tree)), depths.update(map(len, paths(tree)))),
            )
            engine.generate(PROMPTS[2], greedy(14))
            return (
                engine.num_speculative_tokens, max(sizes), max(depths),
                engine.memory.drafter_weights,
            )  # fmt: skip

    *one, weights = drafts("mtp")
    assert one == [count, count, count]
    assert drafts(MTP()) == (count, count, count, weights)
    # The last module runs again where more is asked for, in each way of asking; fewer are fewer.
    assert drafts(MTP(num_speculative_tokens=5)) == (5, 5, 5, weights)
    assert drafts("mtp", **deep) == (5, 5, 5, weights)
    assert drafts(MTP(depth=3)) == (4, 4, 4, weights)
    assert drafts("mtp", num_speculative_tokens=1)[:3] == (1, 1, 1)
    assert (drafts("mtp", num_speculative_tokens=1)[3] < weights) == (count > 1)
    # A tree is as deep as there are modules, and has the nodes that fit in.
    nodes = 2 + 4 * (count - 1)
    assert drafts(MTP(top_k=2)) == (nodes, nodes, count, weights)
    some = drafts(MTP(top_k=2, total_token=4))
    assert some[:2] == (3, min(3, nodes))
    assert 1 <= some[2] <= count
    assert drafts(MTP(top_k=2, depth=4, total_token=8))[2] > 2
    # A merge's number of tokens is for all its parts, and does not ask.
    for options in ({}, deep):
        merged = specrt.drafters.Merge(["ngram", "mtp"])
        assert drafts(merged, **options)[3] == weights
    merge = specrt.drafters.Merge([MTP()])
    assert drafts(merge)[:1] + drafts(merge)[2:] == (8, count, weights)
    assert drafts(specrt.drafters.Merge([MTP(num_speculative_tokens=4)]))[2] == 4
    request = greedy(4, speculation=specrt.Speculation(num_speculative_tokens=9))
    with (
        specrt.Engine(folder, MTP(num_speculative_tokens=2)) as engine,
        pytest.raises(specrt.errors.InvalidArgumentError, match="num_speculative_tokens"),
    ):
        engine.generate([1], request)


def test_a_config_that_says_another_number_of_modules(llama: Path, tmp_path: Path) -> None:
    with_modules(tmp_path / "odd", modules("deepseek", 2, 58), llama, num_nextn_predict_layers=3)
    with pytest.warns(UserWarning, match=r"the config says 3 modules, .* 2: 2 draft"):
        specrt.plan(tmp_path / "odd", "mtp")


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_position_does_not_depend_on_the_number_of_steps(
    count: int, llama: Path, tmp_path: Path
) -> None:
    folder, _ = target_of("deepseek", modules("deepseek", count, 52), llama, tmp_path)
    firsts = []
    for tokens in (*range(1, 9), 13):
        with specrt.Engine(folder, MTP(num_speculative_tokens=tokens), policy="fixed") as engine:
            seen: dict[int, Any] = {}
            own = engine._drafter
            assert own is not None
            own._shared = _core.make_watched_drafter(
                own._shared,
                lambda before, tree: seen.setdefault(len(before), tree.tokens[:1]),  # noqa: B023
            )
            engine.generate(PROMPTS[2], greedy(30))
            firsts.append(seen)
    for other in firsts[1:]:
        common = firsts[0].keys() & other.keys()
        assert len(common) > 5
        assert all(firsts[0][one] == other[one] for one in common if firsts[0][one] and other[one])


@pytest.mark.parametrize("count", [1, 3])
def test_a_prefix_hit_changes_no_draft(count: int, llama: Path, tmp_path: Path) -> None:
    folder, _ = target_of("deepseek", modules("deepseek", count, 56), llama, tmp_path)
    prompt = [7 * i % 100 for i in range(45)]
    spec = MTP(num_speculative_tokens=4)
    with specrt.Engine(
        folder, spec, block_size=8, check_invariants=True, policy="fixed", max_model_len=256
    ) as engine:
        cold, other = engine.generate([prompt, [9, *prompt[1:]]], greedy(20))
        assert other.metrics.cached_prompt_tokens == 0
        for again in (prompt, prompt[:30], [*prompt, *cold.token_ids, 4]):
            warm = engine.generate(again, greedy(20))
            assert warm.metrics.cached_prompt_tokens >= len(again) - 2 * 8 - count
            with specrt.Engine(folder, spec, block_size=8, policy="fixed") as fresh:
                expected = fresh.generate(again, greedy(20))
            assert_same([warm], [expected], count)
            one, two = warm.metrics, expected.metrics
            assert one.accepted_per_position == two.accepted_per_position
            assert one.drafted_per_position == two.drafted_per_position


def test_a_copy_of_the_targets_table_is_not_held_twice(llama: Path, tmp_path: Path) -> None:
    head = module("deepseek", flags={"embedding", "lm_head"}, seed=53)
    own, _ = target_of("deepseek", head, llama, tmp_path / "own")
    tensors = load_file(llama / "model.safetensors")
    head.tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    head.tensors["lm_head.weight"] = tensors["lm_head.weight"]
    copied, _ = target_of("deepseek", head, llama, tmp_path / "copied")
    saved = 2 * 128 * 64 * 4
    plans = [specrt.plan(one, "mtp", max_model_len=128) for one in (own, copied)]
    assert plans[0].drafter_weights - plans[1].drafter_weights == saved


def test_what_is_not_exactly_a_module_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(specrt.errors.LoadError, match=r"model\.layers\.3"):
        specrt.Engine(llama, "mtp")
    folder, _ = target_of("mimo", module("mimo", seed=54), llama, tmp_path)  # without biases
    with pytest.raises(specrt.errors.LoadError, match=r"q_proj\.bias"):
        specrt.Engine(folder, MTP())
    with specrt.Engine(folder) as engine:  # the target alone does not read it
        engine.save(tmp_path / "target.specrt")
    with pytest.raises(specrt.errors.LoadError, match="a saved file"):
        specrt.Engine(tmp_path / "target.specrt", MTP())
    tensors = {**load_file(llama / "model.safetensors"), **stored(module("qwen3_next", seed=55))}
    config = json.loads((llama / "config.json").read_text())
    for name, message in (("mtp.extra.weight", "mtp.extra"), ("mtp.layers.1.x", "mtp.layers.1.s")):
        write(tmp_path / "odd", config, {**tensors, name: torch.zeros(4)})
        with pytest.raises(specrt.errors.SpecrtError, match=message):
            specrt.Engine(tmp_path / "odd", MTP())
    # A layer too many that is no module is nobody's.
    write(tmp_path / "odd", config, {**tensors, "model.layers.3.x": torch.zeros(4)})
    with pytest.raises(specrt.errors.LoadError, match=r"model\.layers\.3\.x"):
        specrt.Engine(tmp_path / "odd")
