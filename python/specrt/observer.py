"""What the scheduler tells of what it does, for metrics and traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .request import Request

__all__ = ["Both", "Observer"]


class Observer:
    """Told of every request and round; does nothing of it unless overridden.

    Called from whichever thread runs rounds (`queued` from the one that submits), one call at a
    time but for `queued`. A `Request` carries its times, all of `time.monotonic`: `arrived`,
    `admitted` (None until it first ran), `first_token`, `last_token`, `finished`; and
    `preemptions`. An exception of an observer is warned of and harms no request.
    """

    def queued(self, request: Request) -> None:
        """A request came in; it waits."""

    def admitted(self, request: Request) -> None:
        """A request begins to run, or runs again after a preemption."""

    def round(
        self,
        plan: Sequence[tuple[int, int]],
        results: Sequence[tuple[Any, ...]],
        seconds: float,
    ) -> None:
        """A round has been run, and not been delivered yet.

        plan: (sequence, prompt tokens or draft nodes at most) pairs. results: as the core's
        `Decoder.round` gives them: (sequence, tokens, logprobs, prompt_logprobs, finish, counters,
        error). seconds: wall time of the round.
        """

    def preempted(self, request: Request) -> None:
        """A request gave its KV blocks to others and waits to be computed again."""

    def finished(self, request: Request) -> None:
        """A request is over: `finish_reason` says how, or `error` is set."""


class Both(Observer):
    """Two as one; the second is told also where the first raises."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._first, self._second = first, second

    def _tell(self, what: str, *told: Any) -> None:
        try:
            getattr(self._first, what)(*told)
        finally:
            getattr(self._second, what)(*told)

    def queued(self, request: Request) -> None:
        self._tell("queued", request)

    def admitted(self, request: Request) -> None:
        self._tell("admitted", request)

    def round(
        self,
        plan: Sequence[tuple[int, int]],
        results: Sequence[tuple[Any, ...]],
        seconds: float,
    ) -> None:
        self._tell("round", plan, results, seconds)

    def preempted(self, request: Request) -> None:
        self._tell("preempted", request)

    def finished(self, request: Request) -> None:
        self._tell("finished", request)
