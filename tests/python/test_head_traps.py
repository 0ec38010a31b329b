"""What has misled other runtimes about draft heads: configs, sizes, odd requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import Head, write
from helpers import assert_same, greedy
from safetensors.torch import load_file
from test_eagle import watched
from test_oracle_heads import medusa_heads, turning_head
from tiny import counter, tiny_llama

import specrt
from specrt import SamplingParams
from specrt.drafters import MTP, Eagle, Eagle3, Medusa, Merge, NGram, Suffix

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=4, seed=3, lm_head_scale=4.0)


def drafts(target: Path, spec: Any) -> Any:
    with specrt.Engine(target, spec, policy="fixed", threads=1) as engine:
        seen = watched(engine)
        engine.generate(list(range(3, 60, 2)), greedy(12))
    return seen


def test_a_heads_rope_wherever_its_config_has_it(target: Path, tmp_path: Path) -> None:
    head = Head("eagle3", seed=31)

    def of(name: str, **config: Any) -> Any:
        raw = {one: value for one, value in head.config().items() if one != "rope_theta"}
        folder = write(tmp_path / name, {**raw, **config}, head.stored())
        return drafts(target, Eagle3(folder, num_speculative_tokens=3, aux_layer_ids=LAYERS))

    top = of("top", rope_theta=5e5)
    nested = of("nested", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert top == nested
    assert top == of("in-scaling", rope_scaling={"rope_theta": 5e5, "rope_type": "default"})
    assert top != of("other", rope_theta=1e4)
    for i, scaling in enumerate((None, {}, {"rope_type": "default"}, {"type": "default"})):
        assert of(f"plain-{i}", rope_theta=5e5, rope_scaling=scaling) == top
    long = {"factor": 8.0, "original_max_position_embeddings": 32}
    yarn = of("yarn", rope_theta=5e5, rope_scaling={"rope_type": "yarn", **long})
    llama3 = of(
        "llama3",
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **long,
        },
    )  # fmt: skip
    assert yarn != llama3
    assert top not in (yarn, llama3)


def padded(target: Path, path: Path, rows: int) -> Path:
    """The target with ids that its tokenizer does not have, which it never says."""
    import json

    tensors = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = torch.zeros(rows, tensors[name].shape[1])
        tensors[name] = torch.cat([tensors[name], more])
    config = json.loads((target / "config.json").read_text())
    return write(path, {**config, "vocab_size": config["vocab_size"] + rows}, tensors)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3-said", "eagle3-d2t"])
def test_a_padded_target_drafts_as_the_plain_one(kind: str, target: Path, tmp_path: Path) -> None:
    head = Head(kind.split("-")[0], draft_vocab=40 if "d2t" in kind else 0, seed=33)
    config = head.config()
    if kind == "eagle3":
        del config["draft_vocab_size"]  # its output head is the target's
    folder = write(tmp_path / "head", config, head.stored())
    if kind == "eagle":
        spec: Any = Eagle(folder, num_speculative_tokens=3)
    else:
        spec = Eagle3(folder, num_speculative_tokens=3, aux_layer_ids=LAYERS)
    wide = padded(target, tmp_path / "wide", 8)
    plain, other = drafts(target, spec), drafts(wide, spec)
    assert [one[0] for one in plain] == [one[0] for one in other]
    for (_, tree), (_, wide_tree) in zip(plain, other, strict=True):
        assert tree.keys() == wide_tree.keys()


HEADS = ("eagle", "mtp", "medusa", "merge", "ngram", "suffix")


def made(kind: str, path: Path, tokens: int = 3) -> tuple[Path, Any]:
    """(a counting target, a drafter for it that is always right where it can be)."""
    folder = counter(path / "target")
    head = turning_head("eagle")
    eagle = write(path / "eagle", head.config(max_position_embeddings=24), head.stored())
    if kind == "mtp":
        from test_oracle_heads import module_folder

        folder = module_folder(path / "mtp", [turning_head("mimo") for _ in range(2)], folder)
        return folder, MTP(num_speculative_tokens=tokens)
    medusa = Medusa(model=medusa_heads(path / "medusa", 2), tree="chain")
    return folder, {
        "eagle": Eagle(eagle, num_speculative_tokens=tokens),
        "medusa": medusa,
        "merge": Merge([NGram(), Eagle(eagle)], num_speculative_tokens=tokens),
        "ngram": NGram(),
        "suffix": Suffix(),
    }[kind]


@pytest.mark.parametrize("kind", HEADS)
def test_odd_requests(kind: str, tmp_path: Path) -> None:
    target, spec = made(kind, tmp_path)
    options: dict[str, Any] = {
        "max_model_len": 40,
        "max_batch_size": 4,
        "check_invariants": True,
        "threads": 1,
    }
    prompts: list[list[int]] = [[3], [3, 4], [3, 4, 5, 6], [*range(16), *range(15)]]
    for gamma in (1, 2, 17):
        with specrt.Engine(
            target, spec, num_speculative_tokens=gamma, policy="fixed", **options
        ) as engine:
            for prompt in prompts:
                for tokens in (0, 1, 2, 3, 5, 40 - len(prompt)):
                    output = engine.generate(prompt, greedy(tokens))
                    assert output.token_ids == [(prompt[-1] + 1 + i) % 16 for i in range(tokens)]
                    assert output.finish_reason == "length"
                    metrics = output.metrics
                    assert metrics.drafted_tokens <= gamma * metrics.rounds
                    if tokens:
                        assert tokens == 1 + metrics.accepted_tokens + metrics.rounds
                    if tokens < 2:
                        assert metrics.drafted_tokens == metrics.rounds == 0
            with pytest.raises(specrt.errors.SpecrtError):
                engine.generate(list(range(16)) * 3, greedy(1))
            with pytest.raises(specrt.errors.SpecrtError):
                engine.generate([3, 16], greedy(1))
            assert engine.generate([3], greedy(2)).token_ids == [4, 5]


@pytest.mark.parametrize("kind", HEADS)
def test_two_threads_and_a_cancelled_stream(kind: str, tmp_path: Path) -> None:
    target, spec = made(kind, tmp_path)
    wrong: list[Any] = []
    with specrt.Engine(target, spec, max_batch_size=3, max_model_len=64, threads=1) as engine:

        def work(seed: int) -> None:
            for i in range(6):
                prompt = [(seed + i) % 16, (seed + i + 1) % 16]
                params = SamplingParams(max_tokens=20, temperature=0.5, seed=seed)
                if i == 2:
                    stream = engine.stream(prompt, params)
                    next(stream)
                    stream.close()
                output = engine.generate(prompt, params)
                if output.token_ids != [(prompt[1] + 1 + j) % 16 for j in range(20)]:
                    wrong.append((seed, i, output.token_ids))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 5)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert not wrong
        alone = engine.generate([3, 4], greedy(20))
    with specrt.Engine(target, spec, max_batch_size=3, max_model_len=64, threads=1) as fresh:
        assert_same([alone], [fresh.generate([3, 4], greedy(20))], kind)
