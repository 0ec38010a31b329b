"""The examples in Python do what they say, and the benchmark's prompts are there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from helpers import assert_same, greedy

import specrt
from specrt import Engine
from specrt.benchmark import Totals, builtin_prompts

ROOT = Path(__file__).resolve().parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "examples" / "drafters" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_phrase_book(counter: Path, l2: Path) -> None:
    book = example("phrase_book").PhraseBook([[10, 11, 12, 13, 14, 15], [11, 12, 99]])
    with Engine(counter, book, threads=1, max_model_len=128) as engine:
        output = engine.generate([9], greedy(12))
    assert output.token_ids == list(range(10, 22))
    # 10, then 11, then 12 to 15 out of the first phrase (two tokens of it known), then one by one.
    assert output.metrics.accepted_tokens == 4
    assert book.propose([1, 11], 8) is None  # one token is no beginning
    assert book.propose([1, 11, 12], 8).tokens == [99]
    assert book.propose([10, 11, 12], 2).tokens == [13, 14]
    with Engine(l2, threads=1, max_model_len=128) as engine:
        expected = engine.generate([1, 2], greedy(40))
    text = [1, 2, *expected.token_ids]
    book = example("phrase_book").PhraseBook([text[5:20], text[20:30][::-1]])
    with Engine(l2, book, threads=1, max_model_len=128) as engine:
        assert_same([engine.generate([1, 2], greedy(40))], [expected], "phrases")


def test_word_pairs(l2: Path) -> None:
    pairs = example("word_pairs").WordPairs(width=2, depth=3)
    tree = pairs.propose([1, 2, 1, 3, 1, 2, 4, 1], 6)
    # Behind 1: 2 twice, 3 once; behind 2: 1 or 4; ...
    assert tree.tokens[:4] == [2, 3, 1, 4]
    assert tree.parents[:4] == [-1, -1, 0, 0]
    assert len(tree) == 6
    with Engine(l2, threads=1, max_model_len=160, max_batch_size=1) as engine:
        expected = engine.generate([1, 2, 3] * 8, greedy(100))
    pairs = example("word_pairs").WordPairs()
    with Engine(l2, pairs, threads=1, max_model_len=160, max_batch_size=1) as engine:
        output = engine.generate([1, 2, 3] * 8, greedy(100))
    assert_same([output], [expected], "pairs")
    assert output.metrics.accepted_tokens > 10


def test_prompts() -> None:
    prompts = builtin_prompts()
    kinds = ("chat", "code", "rewrite", "summarise", "answer")
    assert Counter(one.kind for one in prompts) == dict.fromkeys(kinds, 8)
    assert len({one.id for one in prompts}) == len({one.text for one in prompts}) == 40


def test_lengths_of_prompts(demo_tokenizer: object) -> None:
    lengths = [len(demo_tokenizer.encode(one.text)) for one in builtin_prompts()]
    assert min(lengths) >= 50
    assert max(lengths) <= 400


def test_totals_add_up(l2: Path) -> None:
    with Engine(l2, "ngram", threads=1, max_model_len=160) as engine:
        outputs = engine.generate([[1, 2, 3] * 6, [7, 8] * 9], greedy(60))
        nothing = engine.generate([5], greedy(0))
    both = Totals.of(one.metrics for one in [*outputs, nothing])
    assert both.tokens == 118 == both.accepted + both.rounds
    assert both.drafted == sum(one.metrics.drafted_tokens for one in outputs)
    one = Totals.of([outputs[0].metrics])
    assert one.acceptance_length == pytest.approx(outputs[0].metrics.acceptance_length)
    assert one.alpha == pytest.approx(outputs[0].metrics.alpha)
    assert one.alpha_per_position == pytest.approx(outputs[0].metrics.alpha_per_position)
    empty = Totals.of([])
    assert empty.acceptance_rate == empty.tokens_per_second == empty.alpha == 0.0


def test_comparing_drafters(tmp_path: Path, l2: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "bench" / "drafters" / "compare.py")]
    command += ["--model", str(l2), "--dtype", "float32", "--per-kind", "1", "--repeats", "1"]
    command += ["--max-tokens", "8", "--threads", "1", "--json", str(file)]
    command += ["--max-model-len", "2048", "--num-speculative-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    names = {"ngram", "suffix", "merge", "self-int4", "self-w8a8", "self-layers"}
    assert set(result["kinds"]) == {"chat", "code", "rewrite", "summarise", "answer", "all"}
    for rows in result["kinds"].values():
        assert set(rows) == names
        assert rows["self-layers"]["drafted"] > 0
        for row in rows.values():
            assert len(row["alpha_per_position"]) <= 3
            assert row["tokens"] == row["accepted"] + row["rounds"]
            assert row["vs_plain"] > 0
            assert len(row["vs_plain_by_prompt"]) in (1, 5)


def test_the_readmes_drafter(l2: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("class Echo(specrt.Drafter):")
    scope: dict[str, object] = {"specrt": specrt}
    exec(text[start : text.index("```", start)], scope)
    echo = scope["Echo"]
    assert isinstance(echo, type)
    with Engine(l2, threads=1, max_model_len=128) as engine:
        expected = engine.generate([1, 2, 1], greedy(60))
    with Engine(l2, echo(), threads=1, max_model_len=128) as engine:
        output = engine.generate([1, 2, 1], greedy(60))
    assert_same([output], [expected], "echo")
    assert output.metrics.accepted_tokens > 0
