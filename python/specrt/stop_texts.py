"""Stop texts, looked for while a text grows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopTexts"]


class StopTexts:
    """Lets text through until a stop text is complete; holds back what one may begin with."""

    def __init__(self, stops: Sequence[str], *, kept: bool) -> None:
        """kept: whether the stop text itself is let through."""
        self._stops = stops
        self._kept = kept
        self._longest = max(map(len, stops))
        self._tail = ""
        self.found: str | None = None

    def feed(self, text: str, *, armed: bool) -> str:
        """What is certain now. Unless `armed`, a text that is complete here stops nothing."""
        # What had ended before it was armed is no stop any more: one has to end in the new text.
        old = len(self._tail)
        pending = self._tail + text
        found = [
            (at, -len(one), one)
            for one in self._stops
            if (at := pending.find(one, max(0, old - len(one) + 1))) >= 0
        ]
        if found and armed:
            at, _, self.found = min(found)
            self._tail = ""
            return pending[: at + len(self.found) if self._kept else at]
        hold = 0
        for size in range(min(len(pending), self._longest - 1), 0, -1):
            if any(one.startswith(pending[-size:]) for one in self._stops):
                hold = size
                break
        self._tail = pending[len(pending) - hold :]
        return pending[: len(pending) - hold]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        tail, self._tail = self._tail, ""
        return tail
