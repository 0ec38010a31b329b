"""Every family against transformers: logits, texts, windows, and each kind of rotary embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import greedy
from test_loading import edit_config, values
from test_reference import assert_close, assert_greedy, forced_logits, log_softmax

from specrt import Engine, drafters
from specrt.errors import LoadError
from specrt.loading import ModelFields, open_checkpoint
from specrt.loading.families import FAMILIES
from specrt.loading.rope import default_inv_freq

VOCAB, LENGTHS, TOKENS = 128, (1, 2, 31, 33, 200), 30
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
    FULL: {**LINEAR, "rope_theta": 50000.0},
}

# transformers has no MiMo; test_mtp.py holds it to Qwen2, whose layers it has.
KNOWN = [name for name in FAMILIES if name != "mimo"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-wide-window": ("mistral", {"sliding_window": 40}),
    "qwen2-windows": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8,
         "layer_types": [SLIDING, FULL, FULL, SLIDING]},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 40},
    ),
    "gemma2-layers": (
        "gemma2", {"layer_types": [FULL, SLIDING, SLIDING, FULL], "attention_bias": True}
    ),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),
    "gemma3-linear": ("gemma3_text", {"rope_parameters": GEMMA3_ROPE,
                                      "layer_types": [SLIDING, FULL, SLIDING, FULL]}),
    "gemma3-cap": (
        "gemma3_text",
        {"final_logit_softcapping": 5.0, "tie_word_embeddings": False},
    ),
    "phi3": ("phi3", {}),
    "phi3-part-window": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 8}),
    "phi3-tied-mha": ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True,
                                   "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-mqa": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn-beyond-window": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 512}),
    "yarn-factor": ("mistral", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "yarn-mscale": ("granite", {"rope_parameters": {**YARN, "mscale": 1.1, "mscale_all_dim": 0.7}}),
    "yarn-ends": ("olmo2", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0,
                                                "truncate": False}}),
}  # fmt: skip


def model_of(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def config_of(path: Path, **changes: Any) -> ModelFields:
    with open_checkpoint(edit_config(path, **changes)) as checkpoint:
        return checkpoint.config


def check_first_logits(path: Path, model: Any, **options: Any) -> None:
    """The whole vocabulary's log-probabilities behind each prompt."""
    with Engine(path, **{"max_model_len": 256, "max_batch_size": 8, **options}) as engine:
        outputs = engine.generate(prompts(), greedy(1, logprobs=VOCAB))
    for length, output in zip(LENGTHS, outputs, strict=True):
        assert_close(log_softmax(output), forced_logits(model, output), length)


@pytest.mark.parametrize("case", CASES)
def test_family_equals_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    path = tiny.tiny_family(tmp_path, model_type, **changes)
    model = model_of(path)
    check_first_logits(path, model)
    ngram = drafters.NGram(prompt_lookup_min=1, prompt_lookup_max=3)
    texts = {}
    for drafter in (None, ngram):
        with Engine(path, drafter, max_model_len=256, max_batch_size=8) as engine:
            outputs = engine.generate(prompts(), greedy(TOKENS))
        texts[drafter] = [output.token_ids for output in outputs]
        if drafter is None:
            for output in outputs:
                assert len(output.token_ids) == TOKENS
                assert_greedy(forced_logits(model, output), output.token_ids)
        else:
            assert sum(output.metrics.drafted_tokens for output in outputs) > 0
    assert texts[None] == texts[ngram]


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(KNOWN)


@pytest.mark.parametrize("case", ["mistral", "gemma2", "gemma3-linear", "qwen3-windows"])
def test_many_drafts_at_once_leave_windows_alone(case: str, tmp_path: Path) -> None:
    """Window 8, four drafts a round, 60 tokens in small pieces: nothing depends on the rounds."""
    model_type, changes = CASES[case]
    path = tiny.tiny_family(tmp_path, model_type, **changes)
    prompt = prompts()[2] * 3
    options = {"max_model_len": 256, "max_batch_size": 1, "max_num_batched_tokens": 16}
    with Engine(path, **options) as engine:
        plain = engine.generate(prompt, greedy(60))
    same = drafters.DraftModel(model=path)
    for drafter in (drafters.NGram(prompt_lookup_min=1, prompt_lookup_max=3), same):
        with Engine(
            path, drafter, num_speculative_tokens=4, check_invariants=True, **options
        ) as engine:
            assert engine.generate(prompt, greedy(60)).token_ids == plain.token_ids
    assert_greedy(forced_logits(model_of(path), plain), plain.token_ids)


def test_a_drafter_has_its_own_window(tmp_path: Path) -> None:
    """Accepted drafts are those that transformers' windowed model would have had accepted."""
    import torch
    from safetensors.numpy import load_file

    target = tiny.tiny_family(tmp_path / "target", "mistral", sliding_window=None)
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] *= np.float32(0.15)  # so that the window matters now and then only
    config = json.loads((target / "config.json").read_text())
    draft = tmp_path / "draft"
    for path, window in ((target, None), (draft, 4)):
        tiny.write_checkpoint(path, {**config, "sliding_window": window}, tensors)
    check_first_logits(draft, model_of(draft))
    prompt, count, at_once = prompts()[2][:20], 40, 3
    with Engine(
        target, drafters.DraftModel(model=draft), num_speculative_tokens=at_once,
        max_model_len=128, max_batch_size=1, policy="fixed",
    ) as engine:  # fmt: skip
        output = engine.generate(prompt, greedy(count))
    model, text = model_of(draft), [*prompt, *output.token_ids]
    done, accepted, rounds = 1, 0, 0
    while done < count:
        guess = list(text[: len(prompt) + done])
        right = 0
        for _ in range(min(at_once, count - done)):
            with torch.inference_mode():
                guess.append(int(model(torch.tensor([guess])).logits[0, -1].argmax()))
            if guess[-1] != text[len(guess) - 1]:
                break
            right += 1
        rounds += 1
        right = min(right, count - done - 1)  # the round's own token comes last
        accepted += right
        done += right + 1
    assert (output.metrics.accepted_tokens, output.metrics.rounds) == (accepted, rounds)
    assert 0 < accepted < count


# Rotary embeddings, by config alone.

ROPE_FAMILIES = [name for name in KNOWN if name not in ("gemma3_text", "phi3")]


@pytest.mark.parametrize("model_type", ROPE_FAMILIES)
def test_theta_wherever_it_stands(model_type: str, tmp_path: Path) -> None:
    path = tiny.tiny_family(tmp_path, model_type)
    none = {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...}
    layouts: list[dict[str, Any]] = [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ]
    found = {config_of(path, **{**none, **layout}) for layout in layouts}
    assert len(found) == 1
    hf = model_of(path).model.rotary_emb.inv_freq.numpy()
    assert np.allclose(hf, found.pop().rope_inv_freq, rtol=3e-7, atol=0)


@pytest.mark.parametrize("model_type", ROPE_FAMILIES)
def test_no_scaling_in_any_spelling(model_type: str, tmp_path: Path) -> None:
    path = tiny.tiny_family(tmp_path, model_type)
    found = set()
    for scaling in (None, {}, {"rope_type": "default"}, ...):
        for changes in ({"rope_scaling": scaling, "rope_parameters": ...},
                        {"rope_scaling": ..., "rope_parameters": scaling}):  # fmt: skip
            found.add(config_of(path, rope_theta=2e4, **changes))
    assert len(found) == 1


@pytest.mark.parametrize("model_type", ROPE_FAMILIES)
@pytest.mark.parametrize("rope", [LINEAR, YARN, LLAMA3], ids=lambda one: one["rope_type"])
def test_scaling_is_that_of_transformers(
    model_type: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny.tiny_family(tmp_path, model_type, rope_parameters=rope)
    config, hf = config_of(path), model_of(path).model.rotary_emb
    assert np.allclose(config.rope_inv_freq, hf.inv_freq.numpy(), rtol=5e-7, atol=0)
    assert config.rope_scale == hf.attention_scaling
    # The older layout of the same.
    older = {one: value for one, value in rope.items() if one != "rope_theta"}
    assert config == config_of(
        path, rope_parameters=..., rope_theta=rope["rope_theta"], rope_scaling=older
    )


def test_windows_that_no_text_can_outgrow(tmp_path: Path) -> None:
    for model_type in ("mistral", "phi3"):
        path = tiny.tiny_family(tmp_path / model_type, model_type, sliding_window=2047)
        assert config_of(path).windows == (2047,) * 4
        for window in (2048, 262144, None):
            assert config_of(path, sliding_window=window, layer_types=...).windows == ()


def test_no_kind_of_scaling_equals_another(tmp_path: Path) -> None:
    path = tiny.tiny_family(tmp_path, "llama")
    ropes = [{"rope_type": "default", "rope_theta": 10000.0}, LINEAR, YARN, LLAMA3]
    found = {config_of(path, rope_parameters=rope).rope_inv_freq for rope in ropes}
    assert len(found) == len(ropes)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"factor": 1.0},
        {"factor": 40.0},
        {"beta_fast": 4.0, "beta_slow": 3.9},
        {"beta_fast": 32, "beta_slow": 1, "truncate": False},
        {"attention_factor": 0.9},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"mscale_all_dim": 0.5, "mscale": 0.0},
        {"original_max_position_embeddings": 16},
        {"rope_theta": 1e6, "original_max_position_embeddings": 32768},
    ],
)
def test_yarn_in_every_form(change: dict[str, Any], tmp_path: Path) -> None:
    for head_dim in (8, 16, 64):
        path = tiny.tiny_family(
            tmp_path, "llama", head_dim=head_dim, rope_parameters={**YARN, **change}
        )
        config, hf = config_of(path), model_of(path).model.rotary_emb
        assert np.allclose(config.rope_inv_freq, hf.inv_freq.numpy(), rtol=1e-6, atol=0)
        assert config.rope_scale == hf.attention_scaling


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": (1 + 0.2 * draw.random(pairs)).tolist(),
        "long_factor": (2 + 6 * draw.random(pairs)).tolist(),
        **more,
    }


@pytest.mark.parametrize(
    ("model_type", "part", "more"),
    [
        ("phi3", 1.0, {}),
        ("phi3", 0.75, {}),
        ("phi3", 0.75, {"attention_factor": 1.25}),
        ("llama", 1.0, {"factor": 4.0}),
    ],
)
def test_longrope_short_and_long(
    model_type: str, part: float, more: dict[str, Any], tmp_path: Path
) -> None:
    """One set of factors for all positions: the long one if texts may outgrow the original."""
    partial = {"partial_rotary_factor": part} if model_type == "phi3" else {}
    rope = {**longrope(int(8 * part), **more), **partial}
    path = tiny.tiny_family(
        tmp_path, model_type, rope_parameters=rope, original_max_position_embeddings=210
    )
    model = model_of(path)
    with open_checkpoint(path, max_model_len=210) as checkpoint:
        short = checkpoint.config
    with open_checkpoint(path, max_model_len=211) as checkpoint:
        long = checkpoint.config
    assert long == config_of(path)  # the model's own limit is beyond the original too
    assert short.rope_scale == long.rope_scale == model.model.rotary_emb.attention_scaling != 1.0
    assert short.rope_inv_freq != long.rope_inv_freq
    check_first_logits(path, model, max_model_len=210)
    # transformers would take the short factors for these prompts: give it the long ones.
    config = json.loads((path / "config.json").read_text())
    rope = {**config["rope_parameters"], "short_factor": config["rope_parameters"]["long_factor"]}
    model = model_of(edit_config(path, rope_parameters=rope))
    edit_config(path, rope_parameters=config["rope_parameters"])
    check_first_logits(path, model)


def test_longrope_by_its_older_names(tmp_path: Path) -> None:
    path = tiny.tiny_family(
        tmp_path, "phi3", rope_parameters=longrope(8), original_max_position_embeddings=64
    )
    want = config_of(path)
    for name in ("su", "yarn", "longrope"):
        rope = {key: one for key, one in longrope(8).items() if key.endswith("_factor")}
        rope["type"] = name
        assert want == config_of(path, rope_parameters=..., rope_scaling=rope, rope_theta=1e4)
    part = config_of(path, rope_scaling=None, partial_rotary_factor=0.75)
    assert part.rope_inv_freq == tuple(default_inv_freq(1e4, 12).tolist())
    with pytest.raises(LoadError, match=r"rope_type.*got 'linear'"):
        config_of(path, partial_rotary_factor=..., rope_scaling={"type": "linear", "factor": 2.0})
    for wrong in ([1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + ["1"], None):
        rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": wrong}
        with pytest.raises(LoadError, match=r"long_factor.*8 positive numbers"):
            config_of(path, rope_scaling=rope)


def test_gemma3_layouts_of_rope(tmp_path: Path) -> None:
    path = tiny.tiny_family(
        tmp_path, "gemma3_text", rope_parameters=GEMMA3_ROPE, num_hidden_layers=7
    )
    want = config_of(path)
    hf = model_of(path).model.rotary_emb
    assert np.allclose(want.rope_inv_freq, hf.full_attention_inv_freq, rtol=5e-7, atol=0)
    assert np.allclose(want.rope_local_inv_freq, hf.sliding_attention_inv_freq, rtol=5e-7, atol=0)
    older = {"rope_theta": 50000.0, "rope_local_base_freq": 500.0,
             "rope_scaling": {"rope_type": "linear", "factor": 4.0}}  # fmt: skip
    assert want == config_of(path, rope_parameters=..., **older)
    # The pattern that stood for layer_types.
    assert want == config_of(path, layer_types=..., sliding_window_pattern=6)
    other = config_of(path, sliding_window_pattern=2)
    assert other.windows == (8, 0, 8, 0, 8, 0, 8)
    with pytest.raises(LoadError, match=r"rope_parameters.*'rope_theta'"):
        config_of(path, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(LoadError, match="attention factor of 1"):
        config_of(path, rope_parameters={SLIDING: YARN})


def test_gemma3_with_a_vision_tower_is_refused(tmp_path: Path) -> None:
    path = tiny.tiny_family(tmp_path, "gemma3_text")
    config = json.loads((path / "config.json").read_text())
    want = config_of(path)
    both = {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 8}}
    (path / "config.json").write_text(
        json.dumps({**both, "architectures": ["Gemma3ForConditionalGeneration"]})
    )
    with pytest.raises(LoadError, match=r"Gemma3ForConditionalGeneration.*vision"):
        open_checkpoint(path)
    alone = {"model_type": "gemma3", "text_config": config, "architectures": ["Gemma3ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(alone))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config == want


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("mistral", {"layer_types": [FULL] * 4}, "layer_types.*'sliding_attention'.*got 'full_"),
        ("mistral", {"sliding_window": 0}, "sliding_window.*positive"),
        ("mistral", {"sliding_window": 7.5}, "sliding_window.*whole"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("qwen2", {"layer_types": [SLIDING] * 4}, "sliding_window.*layer 0.*none"),
        ("qwen3", {"layer_types": [FULL]}, "layer_types.*a list of 4"),
        ("qwen3", {"layer_types": [FULL, FULL, FULL, "linear_attention"]},
         "'linear_attention' in layer 3"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ("qwen3", {"head_dim": 16}, r"q_proj\.weight: expected shape \[64, 64\], got \[128, 64\]"),
        ("qwen3", {"attention_bias": True}, r"missing .*q_proj\.bias"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation.*'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention.*got True"),
        ("gemma2", {"sliding_window": None}, "sliding_window.*layer 0.*none"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar.*positive"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping.*positive"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping.*got 50"),
        ("phi3", {"attention_bias": True}, "'attention_bias'"),
        ("phi3", {"lm_head_bias": True}, "'lm_head_bias'"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod.*got 2"),
        ("phi3", {"num_key_value_heads": 4}, r"qkv_proj\.weight: expected shape \[192, 64\]"),
        ("phi3", {"rope_parameters": LINEAR}, "'linear'"),
        ("granite", {"logits_scaling": 0}, "logits_scaling.*positive"),
        ("granite", {"sliding_window": 8}, "'sliding_window'"),
        ("olmo2", {"clip_qkv": 8.0}, "'clip_qkv'"),
        ("olmo2", {"layer_types": [SLIDING] * 4}, "'sliding_attention' in layer 0"),
    ],
)  # fmt: skip
def test_refused_by_name(
    model_type: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tiny.tiny_family(tmp_path, model_type)
    with pytest.raises(LoadError, match=says):
        config_of(path, **changes)


@pytest.mark.parametrize("model_type", KNOWN)
def test_absent_keys_mean_what_they_mean_to_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    from specrt.loading.families import fields_of

    defaults = AutoConfig.for_model(model_type)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads")  # fmt: skip
    stated = {"model_type": model_type, **{key: getattr(defaults, key) for key in sizes}}
    assert fields_of(stated) == fields_of(defaults.to_dict())


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "phi3", "olmo2"])
def test_in_memory_and_bfloat16(model_type: str, tmp_path: Path) -> None:
    """The same tensors out of a folder and a model; norms of 1 + w keep their fp32 sum."""
    path = tiny.tiny_family(tmp_path, model_type, dtype="bfloat16")
    with open_checkpoint(path) as one, open_checkpoint(model_of(path)) as other:
        assert one.config == other.config
        folder, memory = values(one), values(other)
    assert folder.keys() == memory.keys()
    for name, array in folder.items():
        assert np.array_equal(array, memory[name]), name
    if model_type.startswith("gemma"):
        assert np.any(folder["norm"].view(np.uint32) & 0xFFFF)
