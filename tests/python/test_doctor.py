"""`specrt doctor`: each misfit that it knows, made on purpose, is named."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from draft_heads import write
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

import specrt
from specrt.cli import app
from specrt.doctor import Diagnosis, Finding, conclude, diagnose
from specrt.errors import InvalidArgumentError

SIZE, LAYERS, TURN = 64, 5, 7
"""Directions of the stream and tokens; how far each layer turns them."""

Tensors = dict[str, torch.Tensor]
Break = Callable[[dict[str, Any], Tensors], None]
PROMPTS = ["abc", "%&(", "one or two", "XYZ"]


def turned(by: int, scale: float = 1.0) -> torch.Tensor:
    """The matrix that makes of direction i direction i + by."""
    return scale * torch.roll(torch.eye(SIZE), by, 0)


def silent(prefix: str, inputs: int = SIZE) -> Tensors:
    """Attention that adds nothing."""
    return {
        f"{prefix}self_attn.{one}_proj.weight": torch.zeros(SIZE, SIZE if one == "o" else inputs)
        for one in "qkvo"
    }


def turning(prefix: str, by: int, size: float) -> Tensors:
    """An MLP that adds `size` in the direction behind the one that prevails."""
    # silu(x) * x of the normed state, sqrt(64) long.
    return {
        f"{prefix}mlp.gate_proj.weight": torch.eye(SIZE),
        f"{prefix}mlp.up_proj.weight": torch.eye(SIZE),
        f"{prefix}mlp.down_proj.weight": turned(by, size / SIZE),
        f"{prefix}post_attention_layernorm.weight": torch.ones(SIZE),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts: token t is followed by t + 1. What enters layer l is direction t + 7 l, nearly."""
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.eye(SIZE),
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": turned(1 - TURN * LAYERS, 5.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= silent(prefix) | turning(prefix, TURN, 30.0 ** (layer + 1))
        tensors[f"{prefix}input_layernorm.weight"] = torch.ones(SIZE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    path = write(tmp_path_factory.mktemp("doctor") / "target", config, tensors)
    return small_tokenizer(path)


def small_tokenizer(path: Path) -> Path:
    """Sixty-four letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(ord(" ") + i) for i in range(SIZE)]
    backend = Tokenizer(models.WordLevel({one: i for i, one in enumerate(letters)}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=" ").save_pretrained(path)
    return path


def fuse(by: int = 0) -> torch.Tensor:
    """Of layers 1, 2, 3 in this order, direction t + 21 + by; in any other, another one.

    The stream grows thirtyfold a layer, so that a layer in an earlier one's place prevails.
    """
    parts = [(3.0, 1), (2.0, 2), (1.0, 3)]
    return torch.cat([turned(TURN * (3 - at) + by, 4.5 * size / 30.0**at) for size, at in parts], 1)


def eagle3(path: Path, broken: Break | None = None) -> Path:
    """Reads layers 1, 2, 3 and turns by one each step: always right.

    Its own state is of use behind its last norm alone, which makes it small beside the next turn.
    """
    kept = torch.tensor([one for one in range(SIZE) if one not in (5, 17, 33)])
    tensors: Tensors = {
        "fc.weight": fuse(),
        "midlayer.hidden_norm.weight": torch.ones(SIZE),
        "midlayer.input_layernorm.weight": torch.ones(SIZE),
        "norm.weight": torch.full((SIZE,), 0.01),
        "lm_head.weight": turned(-3 * TURN + 1, 500.0)[kept],
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.isin(torch.arange(SIZE), kept),
        **silent("midlayer.", 2 * SIZE),
        **turning("midlayer.", 1, 60.0),
    }
    config = head_config(norm_output=True, draft_vocab_size=len(kept))
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    if broken is not None:
        broken(config, tensors)
    return write(path, config, tensors)


def head_config(**more: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    return {**config, **more}


def layers(*ids: int) -> Break:
    named = {"eagle_aux_hidden_state_layer_ids": list(ids)}
    return lambda config, _: config.update(eagle_config=named)


def absolute(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def raw_residual(config: dict[str, Any], tensors: Tensors) -> None:
    """The target's state prevails over the turn where it is not normed: and so it is meant."""
    tensors["fc.weight"] = tensors["fc.weight"] * 1e6
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], -1, 1)
    config["norm_before_residual"] = True


def random_weights(config: dict[str, Any], tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        if value.ndim == 2:
            tensors[name] = torch.randn(value.shape, generator=generator)


MISFITS: dict[str, tuple[Break, str]] = {
    "a layer late": (layers(2, 3, 4), "aux layers one earlier: 1, 2, 3"),
    "a layer early": (layers(0, 1, 2), "aux layers one later: 1, 2, 3"),
    "order": (layers(3, 2, 1), "aux order 1, 2, 3"),
    "absolute ids": (absolute, "d2t: target ids, not offsets"),
    "state before the norm": (
        lambda config, _: config.update(norm_output=False),
        "own state fed back after its last norm",
    ),
    "residual": (raw_residual, "residual from the raw state"),
}


def accepted(diagnosis: Diagnosis, name: str) -> float:
    return next(one.accepted for one in diagnosis.findings if name in one.name)


def test_a_head_that_fits(target: Path, tmp_path: Path) -> None:
    diagnosis = diagnose(target, eagle3(tmp_path / "head"), prompts=PROMPTS, tokens=24)
    assert diagnosis.healthy, diagnosis.verdict
    # Three tokens of sixty-four are not among its own.
    assert diagnosis.findings[0].accepted > 3.0
    assert "as it should be" in diagnosis.verdict
    for name in ("aux layers one later", "aux layers one earlier", "aux order 3, 2, 1"):
        assert accepted(diagnosis, name) < 0.5


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_named(name: str, target: Path, tmp_path: Path) -> None:
    broken, reading = MISFITS[name]
    head = eagle3(tmp_path / "head", broken)
    diagnosis = diagnose(target, head, prompts=PROMPTS, tokens=24)
    assert not diagnosis.healthy
    assert diagnosis.best.name.startswith(reading), diagnosis.verdict
    assert diagnosis.best.accepted > diagnosis.findings[0].accepted + 0.5
    assert diagnosis.best.name in diagnosis.verdict
    assert diagnosis.best.cure in diagnosis.verdict


def test_random_weights_are_told(target: Path, tmp_path: Path) -> None:
    head = eagle3(tmp_path / "head", random_weights)
    diagnosis = diagnose(target, head, prompts=PROMPTS, tokens=24)
    assert not diagnosis.healthy
    assert "no reading helps" in diagnosis.verdict


def test_order_of_an_eagle1_head(target: Path, tmp_path: Path) -> None:
    """fc makes of the token's embedding what the target's own head reads."""
    prefix = "layers.0."
    blind = turned(0, 0.0)
    parts = {"right": [turned(TURN * LAYERS), blind], "wrong": [blind, turned(TURN * LAYERS)]}
    found = {}
    for name, columns in parts.items():
        tensors = {"fc.weight": torch.cat(columns, 1), **silent(prefix), **turning(prefix, 0, 0.0)}
        config = head_config(bias=False, rms_norm_eps=1e-6)
        found[name] = diagnose(
            target, write(tmp_path / name, config, tensors), prompts=PROMPTS, tokens=24
        )
    assert found["right"].healthy, found["right"].verdict
    assert found["right"].findings[0].accepted > 3.9
    assert not found["wrong"].healthy
    assert found["wrong"].best.name == "order: hidden state, then embedding"


def test_an_output_head_that_was_not_trained(target: Path, tmp_path: Path) -> None:
    def broken(config: dict[str, Any], tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = tensors["lm_head.weight"].shape
        tensors["lm_head.weight"] = torch.randn(shape, generator=generator)
        # Its states are what the target's own output head reads.
        tensors["fc.weight"] = fuse(TURN * (LAYERS - 3))

    diagnosis = diagnose(target, eagle3(tmp_path / "head", broken), prompts=PROMPTS, tokens=24)
    assert diagnosis.best.name == "target's output head in place of its own"
    assert not diagnosis.healthy


@pytest.fixture(scope="module")
def looking_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose attention matters, for drafters that are nearly itself."""
    path = tmp_path_factory.mktemp("doctor") / "llama"
    tiny.tiny_llama(path, vocab=264, layers=3, seed=5, lm_head_scale=8.0)
    return tiny.byte_tokenizer(path)


def copied(source: Path, path: Path, config: dict[str, Any] | None = None) -> Path:
    """The same model in another folder; `config` are keys that change."""
    raw = json.loads((source / "config.json").read_text())
    write(path, {**raw, **(config or {})}, load_file(source / "model.safetensors"))
    return tiny.byte_tokenizer(path)


def test_a_draft_model_with_anothers_tokenizer(looking_back: Path, tmp_path: Path) -> None:
    draft = copied(looking_back, tmp_path / "draft")
    assert diagnose(looking_back, str(draft), tokens=16).healthy
    path = draft / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocabulary = raw["model"]["vocab"]
    raw["model"]["vocab"] = {text: (id_ * 7 + 3) % 256 for text, id_ in vocabulary.items()}
    path.write_text(json.dumps(raw))
    diagnosis = diagnose(looking_back, str(draft), tokens=16)
    assert not diagnosis.healthy
    assert diagnosis.best.name == "token ids as the target's"
    assert diagnosis.best.accepted > diagnosis.findings[0].accepted + 1.0


def test_rotary_factors_of_a_draft_model(looking_back: Path, tmp_path: Path) -> None:
    raw = json.loads((looking_back / "config.json").read_text())
    changed: dict[str, Any] = {"rope_theta": 2.0}
    if raw.get("rope_parameters"):
        changed = {"rope_parameters": {**raw["rope_parameters"], "rope_theta": 2.0}}
    draft = copied(looking_back, tmp_path / "draft", changed)
    diagnosis = diagnose(looking_back, str(draft), tokens=16)
    assert diagnosis.best.name == "rotary factors: the target's"
    assert not diagnosis.healthy


def test_a_warning_at_load(target: Path, tmp_path: Path) -> None:
    """Of a head whose drafts all fail; none of one that fits, nor where it is not asked for."""
    bad = str(eagle3(tmp_path / "bad", layers(2, 3, 4)))
    with pytest.warns(UserWarning, match="specrt doctor"):
        specrt.Engine(target, drafter=bad).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specrt.Engine(target, drafter=bad, self_test=False).close()
        good = str(eagle3(tmp_path / "good"))
        with specrt.Engine(target, drafter=good, max_batch_size=1) as engine:
            # Nothing is left of it.
            assert engine.generate("abc", specrt.SamplingParams(max_tokens=8)).token_ids
        specrt.Engine(target, drafter=good, max_model_len=16).close()  # no room, no test


def test_verdicts() -> None:
    given = Finding("as given", accepted=0.5, rounds=400)
    better = Finding("otherwise", "do so", accepted=0.56, rounds=400)
    assert conclude([given, better]).healthy  # by chance alone
    clearly = Finding("otherwise", "do so", accepted=0.9, rounds=400)
    assert conclude([given, clearly]).best is clearly
    refused = Finding("as given", error="[d2t] of no use")
    assert "of no use" in conclude([refused]).verdict
    table = conclude([refused, clearly]).table()
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    assert "[d2t]" in console.export_text()


def test_command_line(target: Path, tmp_path: Path) -> None:
    asked = tmp_path / "prompts.txt"
    asked.write_text("\n".join(PROMPTS))
    options = ["--prompts", str(asked), "--tokens", "24"]
    good = CliRunner().invoke(app, ["doctor", str(target), str(eagle3(tmp_path / "a")), *options])
    assert good.exit_code == 0, good.output
    assert "as it should be" in good.output
    head = eagle3(tmp_path / "b", layers(2, 3, 4))
    bad = CliRunner().invoke(app, ["doctor", str(target), str(head), *options])
    assert bad.exit_code == 1
    assert "misread" in bad.output
    with pytest.raises(InvalidArgumentError, match="trained"):
        diagnose(target, "ngram")
    with pytest.raises(InvalidArgumentError, match="tokens"):
        diagnose(target, str(head), tokens=1)
