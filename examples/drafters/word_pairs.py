"""A drafter of trees: the likeliest tokens behind each token, as the target has said them."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import specrt


class WordPairs(specrt.Drafter):
    """Counts pairs of tokens in prompts and outputs, and drafts a tree of the most frequent ones.

    The budget goes to the paths that have been frequent together: the best leaf is opened first.
    """

    num_speculative_tokens = 8

    def __init__(self, width: int = 3, depth: int = 4) -> None:
        self.width, self.depth = width, depth
        self.pairs: dict[int, Counter[int]] = defaultdict(Counter)
        self.last: int | None = None

    def observe(self, committed: list[int]) -> None:
        """What the target chose in a round; one request at a time here, so rounds join up."""
        for token in committed:
            if self.last is not None:
                self.pairs[self.last][token] += 1
            self.last = token

    def propose(self, tokens: list[int], budget: int) -> specrt.DraftTree | None:
        if self.last is None:  # a new text: its prompt counts as well
            for one, other in pairwise(tokens):
                self.pairs[one][other] += 1
        self.last = tokens[-1]
        drafted: list[int] = []
        parents: list[int] = []
        # (how likely the path is, the node that it ends in, its token, its depth)
        open_paths = [(1.0, -1, tokens[-1], 0)]
        while open_paths and len(drafted) < budget:
            likelihood, node, token, depth = open_paths.pop(0)
            following = self.pairs[token]
            total = sum(following.values())
            if depth == self.depth or not total:
                continue
            for child, count in following.most_common(self.width):
                if len(drafted) == budget:
                    break
                drafted.append(child)
                parents.append(node)
                open_paths.append((likelihood * count / total, len(drafted) - 1, child, depth + 1))
            open_paths.sort(key=lambda path: -path[0])
        return specrt.DraftTree(drafted, parents) if drafted else None


def main() -> None:
    from specrt.demo import demo_model_path

    with specrt.Engine(demo_model_path(), drafter=WordPairs(), max_batch_size=1) as engine:
        output = engine.generate(
            "One potato, two potato, three potato,", specrt.SamplingParams(max_tokens=48)
        )
        print(output.text)
        print(output.metrics)


if __name__ == "__main__":
    main()
