"""The script that makes training prompts: repeatable, varied, apart from what is held out."""

from __future__ import annotations

import collections
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specrt.bench.prompts import builtin_prompts

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("training_prompts")
    finally:
        sys.path.remove(str(SCRIPTS))


def runs(text: str, count: int) -> set[tuple[str, ...]]:
    """All runs of so many words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + count]) for i in range(len(words) - count + 1)}


def test_prompts_repeat_and_differ(script: Any) -> None:
    prompts = script.training_prompts(6000, 0)
    assert prompts == script.training_prompts(6000, 0)
    assert script.training_prompts(500, 1) != prompts[:500]
    assert len({one["prompt"] for one in prompts}) == 6000
    counts = collections.Counter(one["kind"] for one in prompts)
    for kind, share in script.SHARES.items():
        assert 0.5 * share < counts[kind] / 6000 < 1.5 * share, kind


def test_held_out_prompts_are_apart(script: Any) -> None:
    """No topic, no template and no run of six words in common with what is trained on."""
    held_out = [one["prompt"] for one in script.held_out_prompts()]
    held_out += [one.text for one in builtin_prompts()]
    assert len(held_out) == len(set(held_out)) > 120
    words = script.words
    material = [
        *script.ACTIVITIES, *script.SUBJECTS, *script.CHARACTERS, *script.TASKS, *script.FACTS,
        *words.ACTIVITY_ASKS, *words.SUBJECT_ASKS, *words.FREE_ASKS, *words.CODE_ASKS,
        *words.GIVEN_ASKS, *words.REWRITE_ASKS, *words.SUMMARY_ASKS, *words.QUESTION_ASKS,
        *words.QUESTIONS, *(text for _, text in words.FUNCTIONS),
    ]  # fmt: skip
    whole = "\n".join(held_out).lower()
    for topic in (*script.ACTIVITIES, *script.TASKS, *script.FACTS, *script.CHARACTERS):
        assert topic.lower() not in whole, topic
    theirs = set[tuple[str, ...]]().union(*(runs(one, 6) for one in held_out))
    for one in material:
        assert not runs(one, 6) & theirs, one
    prompts = script.training_prompts(3000, 0)
    for one in prompts:
        assert not runs(one["prompt"], 8) & theirs, one
