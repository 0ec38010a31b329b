"""A drafter that knows phrases: where the text has begun one, it drafts the rest."""

from __future__ import annotations

import specrt


class PhraseBook(specrt.Drafter):
    """Drafts what follows in a phrase once its first `least` tokens stand at the end of a text."""

    num_speculative_tokens = 8

    def __init__(self, phrases: list[list[int]], least: int = 2) -> None:
        self.phrases = phrases
        self.least = least

    def propose(self, tokens: list[int], budget: int) -> specrt.DraftTree | None:
        # The longest beginning that the text ends in.
        best: list[int] = []
        most = 0
        for phrase in self.phrases:
            for known in range(len(phrase) - 1, max(self.least, most + 1) - 1, -1):
                if tokens[-known:] == phrase[:known]:
                    best, most = phrase[known:], known
                    break
        return specrt.DraftTree.chain(best[:budget]) if best else None


def main() -> None:
    from specrt.demo import demo_model_path

    tokenizer = specrt.Tokenizer.from_pretrained(demo_model_path())
    phrases = [
        " is the capital and most populous city of",
        " one of the most visited cities in the world",
    ]
    drafter = PhraseBook([tokenizer.encode(one, add_special_tokens=False) for one in phrases])
    with specrt.Engine(demo_model_path(), drafter=drafter) as engine:
        output = engine.generate("Paris", specrt.SamplingParams(max_tokens=48))
        print(output.text)
        print(output.metrics)


if __name__ == "__main__":
    main()
