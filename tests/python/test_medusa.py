"""Medusa heads: both layouts, their traps, what they draft, and that no text depends on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_identities, assert_same, greedy

import specrt
from specrt import Engine, InvalidArgumentError, LoadError, SamplingParams, SpecrtError, _core
from specrt.drafters import Medusa, tree_from_accuracies

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 5, "threads": 1}
PROMPTS = [[5], [1, 2, 3], list(range(30)), [7, 7, 7, 8], [200, 100]]
PARAMS = [
    greedy(40),
    SamplingParams(max_tokens=40, temperature=1.0, seed=1, logprobs=1),
    SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(max_tokens=40, temperature=1.3, top_k=20, repetition_penalty=1.2, seed=3),
    SamplingParams(max_tokens=40, frequency_penalty=0.5, logit_bias={7: 2.0}, seed=4),
]
Tensors = dict[str, np.ndarray]


def write(path: Path, tensors: Tensors, config: dict[str, Any], file: str = "") -> Path:
    """A folder of heads; .pt files by torch."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    file = file or "medusa_lm_head.safetensors"
    if file.endswith(".safetensors"):
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, path / file)
    else:
        import torch

        torch.save(
            {name: torch.from_numpy(one.copy()) for name, one in tensors.items()}, path / file
        )
    return path


def random_heads(
    heads: int = 4, blocks: int = 1, vocab: int = 264, hidden: int = 64, seed: int = 0,
    bias: bool = True,
) -> Tensors:  # fmt: skip
    """In the reference's names."""
    draw = np.random.default_rng(seed)
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = draw.normal(0, 0.2, (hidden, hidden))
            if bias:
                tensors[f"{i}.{j}.linear.bias"] = draw.normal(0, 0.5, hidden)
        tensors[f"{i}.{blocks}.weight"] = draw.normal(0, 0.5, (vocab, hidden))
    return {name: one.astype(np.float32) for name, one in tensors.items()}


def renamed(tensors: Tensors, prefix: str = "") -> Tensors:
    """The reference's tensors under vLLM's names."""
    out: Tensors = {}
    for name, one in tensors.items():
        parts = name.split(".")
        if parts[2] == "linear":
            out[f"{prefix}blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = one
        else:
            out[f"{prefix}lm_heads.{parts[0]}.weight"] = one
    return out


REFERENCE = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
VLLM = {"model_type": "medusa", "hidden_size": 64, "vocab_size": 264, "num_heads": 4}


def loaded(path: Path, **options: Any) -> _core.MedusaHeads:
    from specrt.loading.medusa import open_medusa

    given = {"vocab_size": 264, "hidden_size": 64, "target_dtype": "float32", **options}
    checkpoint = open_medusa(path, **given)
    try:
        return checkpoint.load()
    finally:
        checkpoint.close()


def restated(tensors: Tensors, blocks: int, hidden: np.ndarray, shared: bool = False) -> np.ndarray:
    """The published module in PyTorch: nn.Sequential(*[ResBlock] * n, Linear), all heads."""
    import torch
    from torch import nn

    class ResBlock(nn.Module):
        def __init__(self, weight: np.ndarray, bias: np.ndarray | None) -> None:
            super().__init__()
            self.linear = nn.Linear(*weight.shape[::-1], bias=bias is not None)
            self.linear.weight.data = torch.from_numpy(weight)
            if bias is not None:
                self.linear.bias.data = torch.from_numpy(bias)
            self.act = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.act(self.linear(x))

    out = []
    for i in range(1 + max(int(name.split(".")[0]) for name in tensors)):
        parts: list[nn.Module] = []
        for j in range(blocks):
            at = 0 if shared else j
            parts.append(
                ResBlock(tensors[f"{i}.{at}.linear.weight"], tensors.get(f"{i}.{at}.linear.bias"))
            )
        head = nn.Linear(hidden.shape[1], tensors[f"{i}.{blocks}.weight"].shape[0], bias=False)
        head.weight.data = torch.from_numpy(tensors[f"{i}.{blocks}.weight"])
        with torch.no_grad():
            out.append(nn.Sequential(*parts, head)(torch.from_numpy(hidden)).numpy())
    return np.stack(out)


HIDDEN = np.random.default_rng(9).normal(0, 1, (7, 64)).astype(np.float32)


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_the_published_modules(
    tmp_path: Path, file: str, blocks: int, bias: bool
) -> None:
    tensors = random_heads(3, blocks, bias=bias)
    path = write(tmp_path, tensors, {**REFERENCE, "medusa_num_layers": blocks}, file)
    expected = restated(tensors, blocks, HIDDEN)
    for isa in specrt.available_cpu_isas():
        logits = _core.medusa_logits(loaded(path), HIDDEN, isa)
        assert np.abs(logits - expected).max() < 1e-4 * max(1, np.abs(expected).max() / 10)
        # Whatever rows share a call, a row's logits are the same bits.
        alone = _core.medusa_logits(loaded(path), HIDDEN[3:4], isa)
        assert (alone[:, 0] == logits[:, 3]).all()
    for dtype, close in (("bfloat16", 0.05), ("int8", 0.1), ("w8a8", 0.2), ("int4", 0.5)):
        coarse = _core.medusa_logits(loaded(path, dtype=dtype), HIDDEN)
        assert np.abs(coarse - expected).mean() < close * np.abs(expected).mean()


def test_blocks_that_are_one_and_the_same(tmp_path: Path) -> None:
    # [ResBlock(h)] * n repeats one object: a pickle holds it n times, safetensors may hold it once.
    once = random_heads(2, 1)
    blocks = 3
    tensors = {name.replace(".1.weight", ".3.weight"): one for name, one in once.items()}
    twice = dict(tensors)
    for name, one in tensors.items():
        for j in range(1, blocks):
            if ".0.linear" in name:
                twice[name.replace(".0.linear", f".{j}.linear")] = one
    config = {**REFERENCE, "medusa_num_layers": blocks}
    single = loaded(write(tmp_path / "once", tensors, config))
    several = loaded(write(tmp_path / "several", twice, config, "medusa_lm_head.pt"))
    assert single.config.shared_blocks
    assert single.weight_bytes < several.weight_bytes
    logits = _core.medusa_logits(single, HIDDEN)
    assert (logits == _core.medusa_logits(several, HIDDEN)).all()
    assert np.abs(logits - restated(tensors, blocks, HIDDEN, shared=True)).max() < 1e-3
    # But half of them is a hole.
    del twice["1.2.linear.weight"]
    with pytest.raises(LoadError, match=r"missing tensors 1\.2\.linear\.weight"):
        loaded(write(tmp_path / "hole", twice, config))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllms_names(tmp_path: Path, prefix: str) -> None:
    tensors = random_heads(4, 2)
    path = write(tmp_path, renamed(tensors, prefix), {**VLLM, "num_hidden_layers": 2},
                 "model.safetensors")  # fmt: skip
    assert (
        _core.medusa_logits(loaded(path), HIDDEN)
        == _core.medusa_logits(
            loaded(write(tmp_path / "r", tensors, {**REFERENCE, "medusa_num_layers": 2})), HIDDEN
        )
    ).all()


def test_heads_are_counted_from_the_tensors(tmp_path: Path) -> None:
    # Published configs say 2 where the file has 5.
    path = write(tmp_path, random_heads(5), REFERENCE)
    assert loaded(path).config.num_heads == 5
    assert loaded(path, num_heads=3).config.num_heads == 3
    with pytest.raises(InvalidArgumentError, match=r"\[num_heads\].*5 heads.*6"):
        loaded(path, num_heads=6)
    few = _core.medusa_logits(loaded(path, num_heads=2), HIDDEN)
    assert (few == _core.medusa_logits(loaded(path), HIDDEN)[:2]).all()


def test_one_output_head_for_all(tmp_path: Path) -> None:
    tensors = random_heads(3, 1)
    for i in range(3):
        tensors[f"{i}.1.weight"] = tensors["0.1.weight"]
    expected = _core.medusa_logits(loaded(write(tmp_path / "own", tensors, REFERENCE)), HIDDEN)
    shared = renamed(tensors)
    del shared["lm_heads.1.weight"], shared["lm_heads.2.weight"]
    named = {**shared, "lm_head.weight": shared["lm_heads.0.weight"]}
    del named["lm_heads.0.weight"]
    config = {**VLLM, "original_lm_head": True}
    for name, one in (("first", shared), ("named", named)):
        heads = loaded(write(tmp_path / name, one, config, "model.safetensors"))
        assert heads.config.shared_projection
        assert (_core.medusa_logits(heads, HIDDEN) == expected).all()
    with pytest.raises(LoadError, match="original_lm_head"):
        loaded(write(tmp_path / "each", renamed(tensors), config, "model.safetensors"))
    both = write(tmp_path / "both", {**shared, **named}, config, "model.safetensors")
    with pytest.raises(LoadError, match="got both"):
        loaded(both)


@pytest.mark.parametrize("whole", [False, True])
def test_reduced_vocabulary(tmp_path: Path, whole: bool) -> None:
    kept = np.random.default_rng(2).permutation(264)[:40].astype(np.int64)
    tensors = random_heads(2, 1)
    full = _core.medusa_logits(loaded(write(tmp_path / "full", tensors, REFERENCE)), HIDDEN)
    reduced = renamed(tensors)
    if not whole:
        for i in range(2):
            reduced[f"lm_heads.{i}.weight"] = reduced[f"lm_heads.{i}.weight"][kept]
    reduced["token_map"] = kept
    config = {**VLLM, "truncated_vocab_size": 40}
    heads = loaded(write(tmp_path / "reduced", reduced, config, "model.safetensors"))
    assert (heads.config.outputs, heads.config.token_map) == (40, kept.tolist())
    assert (_core.medusa_logits(heads, HIDDEN) == full[:, :, kept]).all()

    def refused(message: str, changes: Tensors, **said: Any) -> None:
        path = write(tmp_path / "bad", {**reduced, **changes}, {**config, **said},
                     "model.safetensors")  # fmt: skip
        with pytest.raises(LoadError, match=message):
            loaded(path)

    refused("token_map of truncated_vocab_size 41", {}, truncated_vocab_size=41)
    refused("different tokens", {"token_map": np.append(kept[:-1], kept[0])})
    refused("different tokens", {"token_map": np.append(kept[:-1], 264)})
    refused("different tokens", {"token_map": np.append(kept[:-1], -1)})
    refused("whole numbers", {"token_map": kept.astype(np.float32)})
    del reduced["token_map"]
    refused("token_map for truncated_vocab_size 40 of 264, got none", {})


def test_biases_and_what_the_config_says_of_them(tmp_path: Path) -> None:
    # vLLM drops biases that a config does not announce; here they are read, or refused by name.
    for bias in (True, False):
        tensors = random_heads(2, 1, bias=bias)
        for says in (None, True, False):
            config = {**VLLM} if says is None else {**VLLM, "medusa_fc_bias": says}
            path = write(tmp_path, renamed(tensors), config, "model.safetensors")
            if says in (None, bias):
                logits = _core.medusa_logits(loaded(path), HIDDEN)
                assert np.abs(logits - restated(tensors, 1, HIDDEN)).max() < 1e-3
            else:
                with pytest.raises(LoadError, match="medusa_fc_bias"):
                    loaded(path)
    half = random_heads(2, 1)
    del half["1.0.linear.bias"]
    with pytest.raises(LoadError, match=r"missing tensors 1\.0\.linear\.bias"):
        loaded(write(tmp_path / "half", half, REFERENCE))


def test_logit_scale(tmp_path: Path) -> None:
    tensors = renamed(random_heads(2, 1))
    plain = _core.medusa_logits(
        loaded(write(tmp_path / "a", tensors, VLLM, "model.safetensors")), HIDDEN
    )
    scaled = write(tmp_path / "b", tensors, {**VLLM, "logit_scale": 0.5}, "model.safetensors")
    assert (_core.medusa_logits(loaded(scaled), HIDDEN) == plain * 0.5).all()


def test_half_loaded_heads_are_refused(tmp_path: Path) -> None:
    good = random_heads(3, 1)

    def refused(message: str, tensors: Tensors, config: dict[str, Any] | None = None) -> None:
        path = write(tmp_path / "bad", tensors, {**REFERENCE, **(config or {})})
        with pytest.raises(LoadError, match=message):
            loaded(path)

    def without(*names: str, **more: np.ndarray) -> Tensors:
        return {**{name: one for name, one in good.items() if name not in names}, **more}

    refused(r"missing tensors 1\.1\.weight", without("1.1.weight"))
    refused(r"missing tensors 1\.0\.linear\.weight", without("1.0.linear.weight"))
    odd = without("2.0.linear.weight")
    odd["2.0.linaer.weight"] = good["2.0.linear.weight"]
    refused(r"missing tensors 2\.0\.linear\.weight; unexpected tensors 2\.0\.linaer", odd)
    refused(r"unexpected tensors 0\.1\.bias", {**good, "0.1.bias": np.zeros(264, np.float32)})
    refused("unexpected tensors d2t", {**good, "d2t": np.zeros(264, np.int64)})
    refused("expected Medusa heads", {"x": np.zeros(3, np.float32)})
    refused("one shape", without("1.1.weight", **{"1.1.weight": good["1.1.weight"][:100]}))
    refused("2 residual blocks of the config's medusa_num_layers, got 1", good,
            {"medusa_num_layers": 2})  # fmt: skip
    refused("config's hidden_size 32, got 64", good, {"hidden_size": 32})
    refused("'layer_norm_eps' is not supported", good, {"layer_norm_eps": 1e-5})
    square = good["0.0.linear.weight"][:, :32]
    refused(r"0\.0\.linear\.weight: expected shape \[64, 64\]",
            without("0.0.linear.weight", **{"0.0.linear.weight": square}))  # fmt: skip
    eagle = {"fc.weight": square, "midlayer.x": square, "lm_head.weight": good["1.1.weight"]}
    refused("expected residual blocks of Medusa heads .*got fc.weight, lm_head.weight, mid", eagle)
    path = write(tmp_path / "other", good, REFERENCE)
    with pytest.raises(LoadError, match="hidden size of 32, got 64"):
        loaded(path, hidden_size=32)
    with pytest.raises(LoadError, match="vocabulary of 200, got 264"):
        loaded(path, vocab_size=200)
    (path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(LoadError, match=r"expected one of medusa_lm_head"):
        loaded(path)


# Engines.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tree", ["mc_sim_7b_63", "chain", [[0], [1], [0, 2], [0, 0], [3]]])
def test_random_heads_change_no_text(l2: Path, tmp_path: Path, dtype: str, tree: Any) -> None:
    path = write(tmp_path, random_heads(5), REFERENCE)
    with Engine(l2, dtype=dtype, **SMALL) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    drafter = Medusa(model=path, tree=tree)
    with Engine(l2, drafter, dtype=dtype, check_invariants=True, **SMALL) as engine:
        assert_same(engine.generate(PROMPTS, PARAMS), expected, tree)
        alone = [engine.generate(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        assert_same(alone, expected, tree)
        memory = engine.memory
    for one in alone:
        assert_identities(one)
        assert one.metrics.drafted_tokens > 0
    own = {name: value for name, value in SMALL.items() if name != "threads"}
    assert specrt.plan(l2, drafter, dtype=dtype, **own) == memory
    assert memory.drafter_weights > 0 == memory.drafter_kv_cache


def test_a_folder_of_heads_is_recognised(l2: Path, tmp_path: Path) -> None:
    reference = write(tmp_path / "r", random_heads(2), REFERENCE)
    pickled = write(tmp_path / "p", random_heads(2), REFERENCE, "medusa_lm_head.pt")
    vllm = write(tmp_path / "v", renamed(random_heads(2)), VLLM, "model.safetensors")
    for path in (reference, pickled, vllm, str(reference)):
        assert specrt.drafters.resolve(path) == Medusa(model=path)
        with Engine(l2, path, **SMALL) as engine:
            # The reference's tree as deep as there are heads.
            assert engine.num_speculative_tokens == len(
                [one for one in _core.StaticTree.mc_sim_7b_63().paths if len(one) <= 2]
            )
            assert engine.generate([1], greedy(20)).metrics.drafted_tokens > 0
    assert not isinstance(specrt.drafters.resolve(l2), Medusa)


def counting_heads(vocab: int, heads: int, behind: int = 2, bias: bool = True) -> Tensors:
    """For `tiny.counter`: head i says last + i + behind, beyond doubt.

    The counter's hidden state is sqrt(V) times the one-hot of the last token; a block adds nothing
    where its weight is zero and its bias so low that silu gives 0.
    """
    tensors: Tensors = {}
    for i in range(heads):
        tensors[f"{i}.0.linear.weight"] = np.zeros((vocab, vocab), np.float32)
        tensors[f"{i}.0.linear.bias"] = np.full(vocab, -60.0, np.float32)
        table = np.zeros((vocab, vocab), np.float32)  # [next, last]
        last = np.arange(vocab)
        table[(last + i + behind) % vocab, last] = 3.0
        table[(last + i + behind + 7) % vocab, last] = 2.0  # second
        tensors[f"{i}.1.weight"] = table
    return tensors


@pytest.mark.parametrize("layout", ["reference", "vllm"])
def test_oracle_heads_accept_everything(counter: Path, tmp_path: Path, layout: str) -> None:
    # From the hidden state at t the target says last + 1, so head i from 0 says last + 2 + i.
    tensors = counting_heads(256, 4)
    if layout == "reference":
        path = write(tmp_path, tensors, REFERENCE)
    else:
        config = {**VLLM, "hidden_size": 256, "vocab_size": 256}
        path = write(tmp_path, renamed(tensors), config, "model.safetensors")
    # 1 + 8 rounds of 4 + 1, the last one cut: 1 + 40 = 41.
    with Engine(counter, Medusa(model=path, tree="chain"), **SMALL) as engine:
        output = engine.generate([9], greedy(41))
    assert output.token_ids == [(10 + i) % 256 for i in range(41)]
    assert (output.metrics.rounds, output.metrics.accepted_tokens) == (8, 32)
    assert output.metrics.acceptance_rate == 1.0
    assert output.metrics.alpha_per_position == [1.0] * 4
    # One off: the same heads read one token too early, or too late.
    for behind in (1, 3):
        off = write(tmp_path / str(behind), counting_heads(256, 4, behind), REFERENCE)
        with Engine(counter, Medusa(model=off, tree="chain"), **SMALL) as engine:
            output = engine.generate([9], greedy(41))
        assert output.token_ids == [(10 + i) % 256 for i in range(41)]
        assert output.metrics.accepted_tokens == 0


def test_ranks_of_oracle_heads(counter: Path, tmp_path: Path) -> None:
    # Right at depths 1 and 3, second at depth 2, wrong at 4.
    tensors = counting_heads(256, 4)
    second = tensors["1.1.weight"]
    second[second == 3.0], second[second == 2.0] = 1.0, 3.0
    second[second == 1.0] = 2.0
    tensors["3.1.weight"] = counting_heads(256, 4, 5)["3.1.weight"]
    path = write(tmp_path, tensors, REFERENCE)
    for tree, rounds, accepted in (
        ("chain", 20, 20),  # 1 + 20 * (1 + 1)
        ([[0], [0, 0], [0, 1], [0, 1, 0]], 10, 30),  # 1 + 10 * (3 + 1)
        ([[0], [0, 1], [1], [1, 0]], 14, 26),  # 1 + 13 * (2 + 1) + 1
        ([[1], [1, 0]], 40, 0),
        ("mc_sim_7b_63", 10, 30),
    ):
        drafter = Medusa(model=path, tree=tree)
        for verification in ("coupled", "rejection", "typical"):
            with Engine(counter, drafter, verification=verification, max_model_len=160,
                        max_batch_size=2, threads=1) as engine:  # fmt: skip
                for temperature in (0.0, 0.5):
                    params = SamplingParams(max_tokens=41, temperature=temperature, seed=5)
                    output = engine.generate([9], params)
                    assert output.token_ids == [(10 + i) % 256 for i in range(41)]
                    got = (output.metrics.rounds, output.metrics.accepted_tokens)
                    if temperature == 0.0 or verification != "coupled":
                        assert got == (rounds, accepted), (tree, verification, temperature)


def test_first_nodes_of_a_tree(counter: Path, tmp_path: Path) -> None:
    path = write(tmp_path, counting_heads(256, 4), REFERENCE)
    for asked, nodes in ((1, 1), (2, 2), (7, 7), (63, 63), (1000, 63)):
        with Engine(counter, path, num_speculative_tokens=asked, **SMALL) as engine:
            assert engine.num_speculative_tokens == nodes
            output = engine.generate([3], greedy(30))
        depth = max(len(one) for one in _core.StaticTree.mc_sim_7b_63().paths[:nodes])
        assert output.metrics.accepted_tokens >= 29 * depth // (depth + 1) - depth
        assert output.metrics.alpha == 1.0
    with Engine(counter, Medusa(model=path, num_speculative_tokens=3), **SMALL) as engine:
        assert engine.num_speculative_tokens == 3
    with Engine(counter, Medusa(model=path, num_heads=2, tree="chain"), **SMALL) as engine:
        assert engine.num_speculative_tokens == 2
    # Heads deeper than the tree are not even read.
    shallow = specrt.plan(counter, Medusa(model=path, tree=[[0], [1]]))
    deep = specrt.plan(counter, Medusa(model=path))
    assert 3 < deep.drafter_weights / shallow.drafter_weights < 5


def test_reduced_vocabulary_drafts_what_it_knows(counter: Path, tmp_path: Path) -> None:
    even = np.arange(0, 256, 2, dtype=np.int64)
    tensors = renamed(counting_heads(256, 1))
    tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][even]
    tensors["token_map"] = even
    config = {**VLLM, "hidden_size": 256, "vocab_size": 256, "truncated_vocab_size": 128}
    path = write(tmp_path, tensors, config, "model.safetensors")
    with Engine(counter, Medusa(model=path, tree="chain"), **SMALL) as engine:
        output = engine.generate([0], greedy(31))
    # After an odd token comes an even one: right. After an even one the head can only guess wrong.
    assert output.token_ids == list(range(1, 32))
    assert output.metrics.accepted_tokens == 15
    with Engine(counter, Medusa(model=path, tree="chain"), **SMALL) as engine:
        sampled = engine.generate([0], SamplingParams(max_tokens=31, temperature=0.5, seed=1))
    assert sampled.token_ids == output.token_ids


def test_sampled_heads_share_the_targets_noise(
    make_bigram: Callable[..., Path], tmp_path: Path
) -> None:
    # Two steps of the target's own table: head 0 knows the law of what comes behind the next token
    # only on average; on a target whose next token is certain it knows it exactly.
    vocab = 64
    draw = np.random.default_rng(6)
    table = np.zeros((vocab, vocab), np.float32)
    for last in range(0, vocab, 2):
        table[last, (last + 1) % vocab] = 60.0  # an even token is followed by the next one
    table[1::2] = draw.normal(0, 1.5, (vocab // 2, vocab)).astype(np.float32)
    table[1::2, 1::2] = -60.0  # an odd one by any even one
    model = make_bigram(table)
    tensors = counting_heads(vocab, 1)
    ahead = np.zeros((vocab, vocab), np.float32)
    for last in range(0, vocab, 2):
        ahead[last] = table[(last + 1) % vocab]
    tensors["0.1.weight"] = np.ascontiguousarray(ahead.T) / 8
    path = write(tmp_path, tensors, REFERENCE)
    params = SamplingParams(max_tokens=121, temperature=1.0, seed=12, top_k=10)
    rates = {}
    for verification in ("coupled", "rejection"):
        with Engine(
            model, Medusa(model=path, tree="chain"), verification=verification, **SMALL
        ) as engine:
            rates[verification] = engine.generate([1], params).metrics.accepted_tokens
    # Every other token is drafted with its own law and the target's noise: always right.
    assert rates["coupled"] >= 58
    assert rates["rejection"] < rates["coupled"]


def test_settings_are_checked(l2: Path, tmp_path: Path) -> None:
    path = write(tmp_path, random_heads(2), REFERENCE)
    for tree in ("sparse", "", 3, None, {}, [[0], "1"], [[0, 0]], [], [[0], [0]], [[True]], [[-1]],
                 [[1.0]], [0, 1]):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=r"\[tree\]"):
            Medusa(model=path, tree=tree)
    for name in ("num_heads", "num_speculative_tokens"):
        for value in (0, -1, 1.5, True, "2"):
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
                Medusa(model=path, **{name: value})
    with pytest.raises(InvalidArgumentError, match=r"\[model\]"):
        Medusa(model=3)
    with pytest.raises(InvalidArgumentError, match=r"\[tree\].*at most 2 ranks.*3"):
        Engine(l2, Medusa(model=path, tree=[[0], [0, 0], [0, 0, 0]]), **SMALL)
    with pytest.raises(InvalidArgumentError, match=r"\[num_heads\]"):
        Engine(l2, Medusa(model=path, num_heads=3), **SMALL)
    with pytest.raises(InvalidArgumentError, match=r"\[tree\] expected 'chain'.*'block'"):
        Engine(l2, path, verification="block", **SMALL)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        Engine(l2, Medusa(model=path, dtype="fp4"), **SMALL)
    with Engine(l2, Medusa(model=path, tree="chain"), verification="block", **SMALL) as engine:
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
        assert engine.generate([1], params).metrics.drafted_tokens > 0


def test_heads_gone_nan_cost_drafts_alone(l2: Path, tmp_path: Path) -> None:
    tensors = random_heads(2)
    tensors["1.1.weight"][5] = np.nan
    path = write(tmp_path, tensors, REFERENCE)
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    with Engine(l2, path, **SMALL) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
    assert_same(outputs, expected, "nan")
    assert all(len(one.metrics.alpha_per_position) <= 1 for one in outputs)


def test_after_a_prefix_hit(counter: Path, tmp_path: Path) -> None:
    path = write(tmp_path, counting_heads(256, 4), REFERENCE)
    with Engine(counter, path, check_invariants=True, **SMALL) as engine:
        first = engine.generate(list(range(50)), greedy(30))
        again = engine.generate(list(range(50)), greedy(30))
    assert again.metrics.cached_prompt_tokens > 0
    assert again.token_ids == first.token_ids
    assert again.metrics.accepted_tokens == first.metrics.accepted_tokens > 20


def test_tree_from_accuracies() -> None:
    assert tree_from_accuracies([[0.6, 0.2], [0.5, 0.4]], 4) == [[0], [0, 0], [0, 1], [1]]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgumentError, match=r"\[nodes\]"):
            tree_from_accuracies([[0.5]], wrong)
    with pytest.raises(InvalidArgumentError, match="from 0 to 1"):
        tree_from_accuracies([[1.5]], 3)


def test_on_the_demo_model(demo_bf16: Path, tmp_path: Path) -> None:
    path = write(tmp_path, random_heads(2, 1, vocab=49152, hidden=576), REFERENCE)
    options: dict[str, Any] = {"max_model_len": 128, "max_batch_size": 5}
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 49152, n).tolist() for n in (1, 3, 8, 20, 40)]
    params = [one for one in PARAMS if one.repetition_penalty == 1.0]
    params = [SamplingParams(**{**vars(one), "max_tokens": 10}) for one in (*params, params[0])]
    with Engine(demo_bf16, **options) as engine:
        expected = engine.generate(prompts, params)
    for drafter in (Medusa(model=path), Medusa(model=path, tree="chain")):
        with Engine(demo_bf16, drafter, **options) as engine:
            outputs = engine.generate(prompts, params)
            alone = engine.generate(prompts[1], params[1])
        assert_same(outputs, expected, drafter)
        assert_same([alone], expected[1:2], drafter)
        assert all(one.metrics.drafted_tokens > 0 for one in outputs)


def test_error_names_the_drafter(l2: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecrtError, match="no such file or folder"):
        Engine(l2, Medusa(model=tmp_path / "none"), **SMALL)


def test_with_a_grammar(l2_eos: Path, tmp_path: Path) -> None:
    path = write(tmp_path, random_heads(4), REFERENCE)
    params = [
        SamplingParams(
            max_tokens=25,
            temperature=temperature,
            seed=6,
            structured_outputs=specrt.StructuredOutputs(regex="[a-f0-9 ]+x"),
        )
        for temperature in (0.0, 1.0)
    ]
    with Engine(l2_eos, **SMALL) as engine:
        expected = engine.generate([[1], [2]], params)
    with Engine(l2_eos, path, **SMALL) as engine:
        outputs = engine.generate([[1], [2]], params)
    assert_same(outputs, expected, "grammar")
