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

    def queued(self, request: Request) -> None:
        try:
            self._first.queued(request)
        finally:
            self._second.queued(request)

    def admitted(self, request: Request) -> None:
        try:
            self._first.admitted(request)
        finally:
            self._second.admitted(request)

    def round(
        self,
        plan: Sequence[tuple[int, int]],
        results: Sequence[tuple[Any, ...]],
        seconds: float,
    ) -> None:
        try:
            self._first.round(plan, results, seconds)
        finally:
            self._second.round(plan, results, seconds)

    def preempted(self, request: Request) -> None:
        try:
            self._first.preempted(request)
        finally:
            self._second.preempted(request)

    def finished(self, request: Request) -> None:
        try:
            self._first.finished(request)
        finally:
            self._second.finished(request)
