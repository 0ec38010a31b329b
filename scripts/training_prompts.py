"""Prompts to train a drafter of a chat model on, and held-out ones: templates times topics.

    python scripts/training_prompts.py --count 8000 --seed 0 --out prompts.jsonl
    python scripts/training_prompts.py --held-out --out held_out.jsonl

The first are as a user's might be (chat 55 %, code 12 %, code given 7 %, rewriting 12 %,
summarising 7 %, question answering 7 %), all different, the same for the same seed. The held-out
ones share no topic and no template with them; nor do the benchmark's own (`specrt.bench.prompts`).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import training_material as words

SHARES = {
    "chat": 0.55, "code": 0.12, "code given": 0.07, "rewrite": 0.12, "summarise": 0.07,
    "answer": 0.07,
}  # fmt: skip


def items(text: str) -> list[str]:
    """The parts of a list, its line breaks gone."""
    return [" ".join(one.split()) for one in text.split("|") if one.strip()]


ACTIVITIES, SUBJECTS = items(words.ACTIVITIES), items(words.SUBJECTS)
CHARACTERS, TASKS, FACTS = items(words.CHARACTERS), items(words.CODE_TASKS), items(words.FACTS)
PEOPLE, PLACES, ROLES = items(words.PEOPLE), items(words.PLACES), items(words.ROLES)
THINGS, VERBS, FEELINGS = items(words.THINGS), items(words.VERBS), items(words.FEELINGS)
REASONS, RESULTS = items(words.REASONS), items(words.RESULTS)


def passage(r: random.Random) -> str:
    """Some sentences about somebody, or about the world."""
    if r.random() < 0.35:
        return ". ".join(r.sample(FACTS, r.choice([2, 2, 3]))) + "."
    person, role, place = r.choice(PEOPLE), r.choice(ROLES), r.choice(PLACES)
    thing, verb, month = r.choice(THINGS), r.choice(VERBS), r.choice(words.MONTHS)
    number, feeling = r.choice(words.NUMBERS), r.choice(FEELINGS)
    openings = [
        f"{person} is a {role} from {place}. In {month} {person} {verb} {thing} "
        f"{r.choice(REASONS)}.",
        f"Last {month}, {person}, who works as a {role} in {place}, {verb} {thing}, "
        f"{r.choice(REASONS)}.",
        f"People in {place} still talk about {person}, the {role}. One morning in {month} {person} "
        f"{verb} {thing} {r.choice(REASONS)}.",
    ]
    details = [
        f"It took {number} days until everything was ready.",
        f"The whole thing cost {number} dollars.",
        f"About {number} people heard of it within a week.",
        f"At first {person} was {feeling}, but that changed quickly.",
        f"The family was {feeling} when they saw it.",
        f'"I have never been so {feeling}," said {person}.',
        f"A colleague from {r.choice(PLACES)} helped on {r.choice(['Monday', 'Friday'])}.",
    ]
    parts = [r.choice(openings), *r.sample(details, r.choice([1, 2, 3])), r.choice(RESULTS) + "."]
    if r.random() < 0.4:
        parts.append(r.choice(FACTS) + ".")
    return " ".join(parts)


def chat(r: random.Random) -> str:
    where = r.random()
    if where < 0.42:
        return r.choice(words.ACTIVITY_ASKS).format(r.choice(ACTIVITIES))
    if where < 0.85:
        return r.choice(words.SUBJECT_ASKS).format(r.choice(SUBJECTS))
    one, other = r.sample(CHARACTERS, 2)
    return r.choice(words.FREE_ASKS).format(a=one, b=other)


def code(r: random.Random) -> str:
    return r.choice(words.CODE_ASKS).format(lang=r.choice(words.LANGUAGES), task=r.choice(TASKS))


def code_given(r: random.Random) -> str:
    lang, text = r.choice(words.FUNCTIONS)
    other = r.choice([one for one in words.LANGUAGES if one != lang])
    fenced = f"```{lang.lower()}\n{text}\n```" if r.random() < 0.6 else text
    return r.choice(words.GIVEN_ASKS).format(lang=lang, other=other, code=fenced)


def rewrite(r: random.Random) -> str:
    return r.choice(words.REWRITE_ASKS).format(text=passage(r))


def summarise(r: random.Random) -> str:
    text = passage(r) + (" " + passage(r) if r.random() < 0.5 else "")
    return r.choice(words.SUMMARY_ASKS).format(text=text)


def answer(r: random.Random) -> str:
    ask, question = r.choice(words.QUESTION_ASKS), r.choice(words.QUESTIONS)
    return ask.format(text=passage(r), question=question)


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "chat": chat, "code": code, "code given": code_given, "rewrite": rewrite,
    "summarise": summarise, "answer": answer,
}  # fmt: skip


def training_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """`count` different prompts with their kinds, in random order.

    A kind that has no more different ones leaves its share to the others.
    """
    r = random.Random(seed)
    seen: set[str] = set()
    found = []
    kinds, weights = list(SHARES), list(SHARES.values())
    misses = 0
    while len(found) < count:
        kind = r.choices(kinds, weights)[0]
        text = MAKERS[kind](r)
        if text in seen:
            misses += 1
            if misses > 200 * count:
                raise SystemExit(f"[count] expected at most about {len(found)}, got {count}")
            continue
        seen.add(text)
        found.append({"prompt": text, "kind": kind})
    return found


def held_out_prompts() -> list[dict[str, str]]:
    """All of them; the same ones every time."""
    topics = items(words.HELD_OUT_TOPICS)
    asks = words.HELD_OUT_ASKS
    found = [
        ("chat", asks[(i + j) % len(asks)].format(topic))
        for i, topic in enumerate(topics)
        for j in (0, 1, 3, 4)
    ]
    found += [("code", one) for one in words.HELD_OUT_CODE]
    texts, given = words.HELD_OUT_TEXTS, words.HELD_OUT_GIVEN
    for kind, templates, fillings in (
        ("code given", words.HELD_OUT_GIVEN_ASKS, given),
        ("rewrite", words.HELD_OUT_REWRITES, texts),
        ("summarise", words.HELD_OUT_SUMMARIES, texts),
        ("answer", words.HELD_OUT_QUESTIONS, texts),
    ):
        found += [(kind, one.format(text)) for one in templates for text in fillings]
    return [{"prompt": text, "kind": kind} for kind, text in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prompts = held_out_prompts() if args.held_out else training_prompts(args.count, args.seed)
    lines = [json.dumps(one, ensure_ascii=False) for one in prompts]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(prompts)} prompts in {args.out}")


if __name__ == "__main__":
    main()
