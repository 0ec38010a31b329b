"""The examples in Python do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from helpers import assert_same, greedy

import specrt
from specrt import Engine

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
