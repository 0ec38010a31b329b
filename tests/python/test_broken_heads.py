"""Heads of every kind that are broken, in all ways but the harmless ones: a typed error, no more.

Every tensor is left out, given other shapes and other types; every config key other values. What is
left either is a head, or is refused with a message of "[what] expected ..., got ...", from headers
alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import Head, Tensors, write
from safetensors.torch import load_file, save_file
from test_medusa import REFERENCE, VLLM, random_heads, renamed
from test_mtp import module, stored
from tiny import tiny_llama

import specrt
from specrt.drafters import MTP, Eagle, Eagle3, Medusa

VALUES: list[Any] = [
    None, -1, 0, 1, 3, 10**9, 10**20, 1.5, float("inf"), "x", [], [1], {}, {"a": 1}, True, False,
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=4, seed=3)


def others(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor in other shapes and types: none of them means the same."""
    yield "a row less", tensor[:-1]
    yield "no rows", tensor[:0]
    yield "a number", tensor.flatten()[0].clone()
    yield "another dimension", tensor[None].clone()
    if tensor.ndim == 2:
        yield "a column less", tensor[:, :-1].contiguous()
    yield "bytes", tensor.to(torch.uint8)
    yield "doubles", tensor.to(torch.float64)


def of_eagle(kind: str, flags: set[str], **more: Any) -> Callable[[Path], Any]:
    head = Head(kind, flags=flags, seed=1, draft_vocab=40 if kind == "eagle3" else 0)

    def opened(path: Path) -> Any:
        return path, (Eagle3 if kind == "eagle3" else Eagle)(path), path

    return head.config(**more), head.stored(), opened


def of_medusa(config: dict[str, Any], tensors: Any, file: str) -> Any:
    def opened(path: Path) -> Any:
        (path / "model.safetensors").rename(path / file)
        return path, Medusa(model=path), path

    return config, {one: torch.from_numpy(t) for one, t in tensors.items()}, opened


def kinds(target: Path) -> dict[str, Any]:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    kept = np.arange(0, 128, 2)
    reduced = renamed(random_heads(2, vocab=128))
    for name in [one for one in reduced if one.startswith("lm_heads")]:
        reduced[name] = reduced[name][kept]
    reduced["token_map"] = kept
    vllm = {**VLLM, "vocab_size": 128, "num_hidden_layers": 1}
    found = {
        "eagle": of_eagle("eagle", {"fc_bias"}, bias=True),
        "eagle-own-tables": of_eagle("eagle", {"embedding", "lm_head"}),
        "eagle3": of_eagle("eagle3", {"embedding"}, **layers),
        "eagle3-nested": of_eagle("eagle3", set(), eagle_config=layers),
        "medusa": of_medusa(REFERENCE, random_heads(3, vocab=128), "medusa_lm_head.safetensors"),
        "medusa-vllm": of_medusa(vllm, renamed(random_heads(3, vocab=128)), "model.safetensors"),
        "medusa-map": of_medusa({**vllm, "truncated_vocab_size": 64}, reduced, "model.safetensors"),
    }
    config = json.loads((target / "config.json").read_text())
    model = load_file(target / "model.safetensors")
    for kind in ("mimo", "qwen3_next", "deepseek"):
        flags = {"embedding", "lm_head"} if kind == "deepseek" else set()
        tensors: Tensors = {}
        for k in range(2):
            tensors.update(stored(module(kind, seed=k, flags=flags), k, 4))

        def opened(path: Path) -> Any:
            return path, MTP(), None

        more = {"num_nextn_predict_layers": 2}
        found[kind] = ({**config, **more}, tensors, opened, model, more)
    return found


def refusal(target: Path, spec: Any) -> str | None:
    """What is said against it; None where it is fine. Errors of other types get out."""
    try:
        specrt.plan(target, spec)
    except specrt.SpecrtError as error:
        return str(error)
    return None


KINDS = (
    "eagle", "eagle-own-tables", "eagle3", "eagle3-nested", "medusa", "medusa-vllm", "medusa-map",
    "mimo", "qwen3_next", "deepseek",
)  # fmt: skip
# What a head may lack or have otherwise: the target's tables serve, or nothing needs it.
FINE = {
    "eagle-own-tables": {"without embed_tokens.weight", "without lm_head.weight"},
    "eagle3": {"without t2d", "without embed_tokens.weight"},
    "eagle3-nested": {"without t2d"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_do_not_fit(kind: str, target: Path, tmp_path: Path) -> None:
    config, tensors, opened, *rest = kinds(target)[kind]
    beside, _ = rest or ({}, {})
    accepted = set()

    def attempt(what: str, changed: Tensors) -> None:
        path = tmp_path / "head"
        write(path, config, {**beside, **changed})
        own, spec, _ = opened(path)
        said = refusal(own if beside else target, spec)
        if said is None:
            accepted.add(what)
        else:
            assert re.match(r"\[.+\] .*(expected|missing|unexpected)", said), (what, said)

    attempt("as it is", tensors)
    for name, tensor in tensors.items():
        attempt(f"without {name}", {one: t for one, t in tensors.items() if one != name})
        for how, other in others(tensor):
            attempt(f"{name} as {how}", {**tensors, name: other})
    assert accepted == {"as it is", *FINE.get(kind, ())}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS[:7])
def test_configs_of_all_sorts(kind: str, target: Path, tmp_path: Path) -> None:
    config, tensors, opened = kinds(target)[kind]
    path, spec, _ = opened(write(tmp_path / "head", config, tensors))
    outcomes = []
    for key in config:
        for value in (..., *VALUES):
            changed = {**config, key: value}
            if value is ...:
                del changed[key]
            (path / "config.json").write_text(json.dumps(changed))
            for one in (spec, str(path)):  # named, and recognised
                said = refusal(target, one)
                outcomes.append(said is None)
                assert said is None or said.startswith("["), (key, value, said)
    assert 10 < sum(outcomes) < len(outcomes) - 20


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_files_cut_short_and_configs_that_are_none(kind: str, target: Path, tmp_path: Path) -> None:
    config, tensors, opened = kinds(target)[kind]
    path, spec, _ = opened(write(tmp_path / "head", config, tensors))
    file = next(path.glob("*.safetensors"))
    whole = file.read_bytes()
    for cut in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        for one in (spec, str(path)):
            with pytest.raises(specrt.LoadError, match="damaged"):
                specrt.plan(target, one)
    file.write_bytes(whole)
    for text in ("", "[]", "3", "{", "null", '{"model_type": "llama"}'):
        (path / "config.json").write_text(text)
        if kind == "medusa" and text.startswith('{"'):
            continue  # Medusa's tensors say it all
        for one in (spec, str(path)):
            with pytest.raises(specrt.LoadError, match=r"config\.json"):
                specrt.plan(target, one)
    (path / "config.json").unlink()
    for one in (spec, str(path)):
        with pytest.raises(specrt.LoadError, match=r"config\.json"):
            specrt.plan(target, one)
    with pytest.raises(specrt.LoadError, match="no such file or folder"):
        specrt.plan(target, type(spec)(model=tmp_path / "none"))


MEDUSA_NAMES = {
    "999999999999.0.linear.weight": "heads 0 to",
    "0.99999999999.linear.weight": "unexpected tensors",
    "00.0.linear.weight": "one of",
    "3.0.linear.weight": "missing tensors 3",
    "0.1.linear.weight": "unexpected|blocks|missing",
    "-1.0.linear.weight": "unexpected",
    "blocks.0.layers.0.weight": "one of|missing|unexpected|Medusa heads",
}


@pytest.mark.parametrize("name", MEDUSA_NAMES)
def test_names_of_medusa_heads_that_lead_nowhere(name: str, target: Path, tmp_path: Path) -> None:
    config, tensors, opened = kinds(target)["medusa"]
    path, spec, _ = opened(write(tmp_path / "head", config, tensors))
    file = next(path.glob("*.safetensors"))
    save_file({**tensors, name: torch.zeros(64, 64)}, file)
    with pytest.raises(specrt.LoadError, match=MEDUSA_NAMES[name]):
        specrt.plan(target, spec)


def test_medusa_heads_of_a_billion_blocks(target: Path, tmp_path: Path) -> None:
    tensors = {
        one.replace(".1.weight", ".1000000000.weight"): t
        for one, t in random_heads(2, vocab=128).items()
    }
    config, tensors, opened = of_medusa(
        {"medusa_num_layers": 10**9}, tensors, "medusa_lm_head.safetensors"
    )
    _, spec, _ = opened(write(tmp_path / "head", config, tensors))
    with pytest.raises(specrt.SpecrtError, match="0 to 1024"):
        specrt.plan(target, spec)


def test_maps_to_the_target_that_are_none(target: Path, tmp_path: Path) -> None:
    config, tensors, opened = kinds(target)["eagle3"]
    d2t = tensors["d2t"]
    far, back = d2t.clone(), d2t.clone()
    far[-1] = 2**62
    back[0] = -1
    for changed, message in (
        ({"d2t": far}, "below 128"),
        ({"d2t": back}, "below 128"),
        ({"d2t": d2t.to(torch.float32)}, "d2t: expected int64 or int32, got float32"),
        ({"d2t": d2t.to(torch.bfloat16)}, "d2t: expected int64 or int32, got bfloat16"),
        ({"d2t": d2t[None]}, r"d2t: expected shape \[40\]"),
        ({"t2d": tensors["t2d"].to(torch.float32)}, "t2d: expected bool"),
        ({"t2d": tensors["t2d"][:100]}, r"t2d: expected shape \[128\], got \[100\]"),
    ):
        _, spec, _ = opened(write(tmp_path / "head", config, {**tensors, **changed}))
        with pytest.raises(specrt.LoadError, match=message):
            specrt.plan(target, spec)
    said = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    _, spec, _ = opened(write(tmp_path / "head", {**config, "eagle_config": said}, tensors))
    with pytest.raises(specrt.LoadError, match=r"the same layers in eagle_config.*\[1, 2, 3\]"):
        specrt.plan(target, spec)
    config["eagle_aux_hidden_state_layer_ids"] = []
    _, spec, _ = opened(write(tmp_path / "head", config, tensors))
    with pytest.raises(specrt.LoadError, match="layers of the target, 0 to 4, got"):
        specrt.plan(target, spec)
