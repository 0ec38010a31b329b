"""Draft models of another vocabulary: tokens are matched by their text, the target decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from helpers import assert_same, greedy
from safetensors.numpy import load_file, save_file

from specrt import Engine, InvalidArgumentError, SamplingParams, Tokenizer
from specrt.text import map_vocabulary

SMALL = {"max_batch_size": 4, "max_num_batched_tokens": 64, "threads": 1}
TARGET = {"vocab": 260, "seed": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return tiny.byte_tokenizer(tiny.tiny_llama(folder / "model", **TARGET))


def swapped_twin(folder: Path, one: int, other: int) -> Path:
    """The target itself under a vocabulary in which two tokens have changed places."""
    path = tiny.tiny_llama(folder, **TARGET)
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = tensors[name].copy()
        table[[one, other]] = table[[other, one]]
        tensors[name] = table
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tiny.byte_tokenizer(path, swap=(one, other))


def with_merges(path: Path, merges: list[tuple[str, str]]) -> Path:
    """BYTE with merged tokens behind the specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = tiny.byte_alphabet()
    vocabulary = {alphabet[b]: b for b in range(256)}
    for index, (left, right) in enumerate(merges):
        vocabulary[left + right] = 256 + index
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(path)
    return path


def test_a_twin_under_other_ids_is_always_accepted(target: Path, tmp_path: Path) -> None:
    twin = swapped_twin(tmp_path / "twin", 97, 98)
    prompts = [[97, 98, 99], [98] * 20, list(range(60, 110))]
    params = [
        greedy(40, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=1.5, seed=7, ignore_eos=True, logprobs=2),
        SamplingParams(
            max_tokens=40, temperature=1.0, top_p=0.9, seed=8, ignore_eos=True,
            repetition_penalty=1.3,
        ),
    ]  # fmt: skip
    with Engine(target, **SMALL) as engine:
        expected = engine.generate(prompts, params)
    with pytest.warns(UserWarning, match="another vocabulary.*token 97"):
        engine = Engine(target, twin, num_speculative_tokens=5, **SMALL)
    with engine:
        outputs = engine.generate(prompts, params)
    assert_same(outputs, expected, "twin")
    for output in outputs:
        assert output.metrics.drafted_tokens > 20
        assert output.metrics.accepted_tokens >= output.metrics.drafted_tokens - 5
        assert output.metrics.alpha == 1.0


def test_tokens_of_the_target_alone(target: Path, tmp_path: Path) -> None:
    # The target has merged tokens that the draft model reads as bytes, and cannot draft.
    merged = with_merges(
        tiny.tiny_llama(tmp_path / "merged", vocab=259, seed=4), [("a", "b"), ("ab", "c")]
    )
    own, other = Tokenizer.from_pretrained(merged), Tokenizer.from_pretrained(target)
    mapped = map_vocabulary(own, other, 259)
    assert mapped.draft_of_target[:256] == list(range(256))
    assert mapped.draft_of_target[256] == mapped.draft_of_target[257] == -1
    assert mapped.pieces[256] == [97, 98]
    assert mapped.pieces[257] == [97, 98, 99]
    assert mapped.draft_of_target[258] == other.eos_token_id
    assert mapped.shared == 257

    prompts = [[257, 256, 3], [100] * 9 + [257] * 30, [256]]
    params = [
        SamplingParams(
            max_tokens=60, temperature=2.0, seed=one, ignore_eos=True, logit_bias={256: 9, 257: 9}
        )
        for one in range(3)
    ]
    with Engine(merged, **SMALL) as engine:
        expected = engine.generate(prompts, params)
    for verification in ("coupled", "rejection"):
        with pytest.warns(UserWarning, match="another vocabulary"):
            engine = Engine(merged, target, verification=verification, policy="fixed", **SMALL)
        with engine:
            outputs = engine.generate(prompts, params)
            assert sum(one.metrics.drafted_tokens for one in outputs) > 100
            if verification == "coupled":
                assert_same(outputs, expected, "bytes for merges")
                assert any(t in (256, 257) for one in outputs for t in one.token_ids)
            engine._decoder.check_invariants()


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    def words(path: Path, names: list[str]) -> Path:
        tiny.tiny_llama(path, vocab=len(names))
        Backend(models.WordLevel({one: i for i, one in enumerate(names)}, names[0])).save(
            str(path / "tokenizer.json")
        )
        return path

    left = words(tmp_path / "left", [f"left{i}" for i in range(32)])
    right = words(tmp_path / "right", [f"right{i}" for i in range(40)])
    with pytest.raises(InvalidArgumentError, match=r"\[drafter\].*32.*40.*shares none"):
        Engine(left, right, **SMALL)


def test_impossible_ids_are_refused(target: Path) -> None:
    from specrt import _core
    from specrt.loaded import open_target

    opened = open_target(target, tokenizer=None, dtype="auto", max_model_len=None)
    model = opened.load()
    options = {
        "target_vocab_size": 260, "kv_cache_bytes": 1 << 22, "max_model_len": 64,
        "max_batch_size": 1, "max_rows": 64, "block_size": 16, "enable_prefix_caching": True,
        "team": _core.ThreadTeam(1), "cpu_isa": "auto",
    }  # fmt: skip
    good = ([-1] * 260, [[]] * 260)
    _core.make_model_drafter(model, vocabulary=good, **options)
    for bad in (
        ([-1] * 259, [[]] * 259),
        ([260] + [-1] * 259, [[]] * 260),
        ([-1] * 260, [[-1]] + [[]] * 259),
    ):
        with pytest.raises(InvalidArgumentError, match=r"\[vocabulary\]"):
            _core.make_model_drafter(model, vocabulary=bad, **options)
    assert np.all(np.array(good[0]) == -1)
