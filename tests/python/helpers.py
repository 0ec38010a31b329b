"""Drafters of known quality and comparisons of outputs, for tests of whole engines."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import specrt
from specrt import DraftTree, RequestOutput, SamplingParams


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy, with a fixed seed so that whole outputs can be compared."""
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 0, **options})


def bits(value: float) -> bytes:
    """A float's bits, so that -0.0 differs from 0.0 and NaN equals itself."""
    return struct.pack("<d", value)


def fingerprint(output: RequestOutput) -> tuple[Any, ...]:
    """Everything of an output that may not depend on how it came about."""
    return (
        output.prompt_token_ids,
        output.seed,
        output.lossless,
        _logprobs(output.prompt_logprobs),
        [
            (
                one.index,
                one.token_ids,
                one.text,
                one.finish_reason,
                one.stop_reason,
                _logprobs(one.logprobs),
            )
            for one in output.outputs
        ],
    )


def _logprobs(steps: Sequence[dict[int, specrt.Logprob] | None] | None) -> Any:
    if steps is None:
        return None
    return [
        step
        and [(token, bits(one.logprob), one.rank, one.decoded_token) for token, one in step.items()]
        for step in steps
    ]


def assert_same(got: Sequence[RequestOutput], expected: Sequence[RequestOutput], what: Any) -> None:
    """Bit for bit the same outputs."""
    assert len(got) == len(expected), what
    for row, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.token_ids == other.token_ids, (what, row)
        assert fingerprint(one) == fingerprint(other), (what, row)


def assert_identities(output: RequestOutput) -> None:
    """What the metrics of any finished request satisfy."""
    for index, one in enumerate(output.outputs):
        metrics = one.metrics
        count = len(one.token_ids)
        assert one.index == index
        assert metrics.prompt_tokens == len(output.prompt_token_ids)
        assert 0 <= metrics.cached_prompt_tokens < metrics.prompt_tokens
        assert metrics.completion_tokens == count
        if count:
            assert count == 1 + metrics.accepted_tokens + metrics.rounds
        assert 0 <= metrics.accepted_tokens <= metrics.drafted_tokens
        assert 0 <= metrics.truncated_rounds <= metrics.rounds
        if one.logprobs is not None:
            assert len(one.logprobs) == count


@dataclass
class Tally:
    """Drafts of several runs together, so that a test can tell that both outcomes occurred."""

    drafted: int = 0
    accepted: int = 0

    def add(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            assert_identities(output)
            for one in output.outputs:
                self.drafted += one.metrics.drafted_tokens
                self.accepted += one.metrics.accepted_tokens

    def assert_mixed(self) -> None:
        """At least 30 % of the drafts were accepted and at least 10 % rejected."""
        assert self.drafted > 0
        rate = self.accepted / self.drafted
        assert 0.3 <= rate <= 0.9, f"{self.accepted} of {self.drafted} accepted"


def known(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """Prompts and outputs as the texts that a drafter below may know."""
    return [[*one.prompt_token_ids, *each.token_ids] for one in outputs for each in one.outputs]


class Scripted(specrt.Drafter):
    """Knows whole texts; subclasses make drafts of what comes next in them."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab: int) -> None:
        self.texts = [list(one) for one in texts]
        self.vocab = vocab

    def rest(self, tokens: list[int]) -> list[int]:
        """What follows `tokens` in the first text that begins with them."""
        for text in self.texts:
            if text[: len(tokens)] == tokens:
                return text[len(tokens) :]
        return []

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        return self.draft(self.rest(tokens), len(tokens), budget)

    def draft(self, rest: list[int], at: int, budget: int) -> DraftTree | None:
        raise NotImplementedError

    def other(self, token: int, step: int = 1) -> int:
        """A token that differs from this one."""
        return (token + 1 + step % (self.vocab - 1)) % self.vocab


class Oracle(Scripted):
    """Always right."""

    def draft(self, rest: list[int], at: int, budget: int) -> DraftTree | None:
        return DraftTree.chain(rest[:budget])


class AlwaysWrong(Scripted):
    """Never right; goes on for a second token as if it had been."""

    def draft(self, rest: list[int], at: int, budget: int) -> DraftTree | None:
        return DraftTree.chain([self.other(one, at) for one in rest[: min(budget, 2)]])


class HalfRight(Scripted):
    """Wrong at every `period`-th position of the text, and right once more after that."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab: int, period: int = 3) -> None:
        super().__init__(texts, vocab)
        self.period = period

    def draft(self, rest: list[int], at: int, budget: int) -> DraftTree | None:
        wrong = -(at + 1) % self.period
        chain = rest[: min(budget, wrong + 2)]
        if wrong < len(chain):
            chain[wrong] = self.other(chain[wrong])
        return DraftTree.chain(chain)


class Branching(Scripted):
    """Trees whose right path runs now through a first, now through a later sibling, then ends.

    What `SHAPES` says of a depth: how many siblings, and which of them is right. A wrong sibling
    before the right one has a child, so that the nodes of the right path do not lie together.
    """

    SHAPES = ((1, 0), (2, 1), (1, 0), (3, 2), (2, 0), (1, None))

    def draft(self, rest: list[int], at: int, budget: int) -> DraftTree | None:
        tokens: list[int] = []
        parents: list[int] = []

        def add(token: int, parent: int) -> int:
            tokens.append(token)
            parents.append(parent)
            return len(tokens) - 1

        parent = -1
        for depth, right in enumerate(rest):
            count, place = self.SHAPES[(at + depth) % len(self.SHAPES)]
            right_node = None
            for i in range(count):
                node = add(right if i == place else self.other(right, i), parent)
                if i == place:
                    right_node = node
                elif i == 0 and place is not None:
                    add(right, node)
            if right_node is None:
                break
            parent = right_node
        # Children come after their parents, so any first part of a tree is a tree.
        return DraftTree(tokens[:budget], parents[:budget]) if tokens else None


@dataclass
class LaterSiblings:
    """Counts drafts of which the target took a child that was not its parent's first."""

    drafts: list[tuple[list[int], DraftTree]] = field(default_factory=list)

    def watch(self, drafter: specrt.Drafter) -> specrt.Drafter:
        return Watched(drafter, lambda tokens, tree: self.drafts.append((tokens, tree)))

    def count(self, texts: Iterable[Sequence[int]]) -> int:
        """Of all drafts seen, against the texts that came out."""
        texts = [list(one) for one in texts]
        return sum(
            any(
                text[: len(tokens)] == tokens and _took_later_sibling(tree, text[len(tokens) :])
                for text in texts
            )
            for tokens, tree in self.drafts
        )


def _took_later_sibling(tree: DraftTree, rest: list[int]) -> bool:
    node, later = -1, False
    tokens, parents = tree.tokens, tree.parents
    for token in rest:
        children = [i for i, parent in enumerate(parents) if parent == node]
        places = [i for i in children if tokens[i] == token]
        if not places:
            break
        node = places[0]
        later = later or node != children[0]
    return later


class Watched(specrt.Drafter):
    """Another drafter, with a call for each of its drafts."""

    def __init__(self, inner: specrt.Drafter, note: Callable[[list[int], DraftTree], None]) -> None:
        self.inner, self.note = inner, note

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        tree = self.inner.propose(tokens, budget)
        if tree is not None and len(tree):
            self.note(list(tokens), tree)
        return tree

    def observe(self, committed: list[int]) -> None:
        self.inner.observe(committed)


class Counting(specrt.Drafter):
    """For counters: the oracle with step 1, always wrong with another."""

    def __init__(self, step: int = 1, vocab: int = 256) -> None:
        self.step, self.vocab = step, vocab

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        chain = [(tokens[-1] + self.step * (i + 1)) % self.vocab for i in range(budget)]
        return DraftTree.chain(chain)
