"""`RequestHandle`: a request that runs in the background."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError
from .request import request_output

if TYPE_CHECKING:
    from .delivery import Delivery
    from .outputs import Increment, RequestOutput
    from .request import Request
    from .scheduler import Scheduler

__all__ = ["RequestHandle"]


class RequestHandle:
    """What `Engine.submit` gives: a request that runs while you do something else.

        for increment in engine.submit("Once upon a time"):   # or: async for
            print(increment.text, end="")
        output = engine.submit("Once upon a time").result()   # or: await

    Iterating gives increments as they become certain, each once, also to several readers; the end
    raises the request's error, if it has one. A handle that is let go of cancels its request.
    """

    def __init__(self, scheduler: Scheduler, requests: list[Request], delivery: Delivery) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._delivery = delivery

    def __repr__(self) -> str:
        tokens = sum(one.transcript.count for one in self._requests)
        return f"<RequestHandle: {'done' if self.done else 'running'}, {tokens} tokens so far>"

    @property
    def done(self) -> bool:
        """Whether it is over: finished, failed or cancelled."""
        return self._delivery.over

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises the request's error, or TimeoutError after `timeout` seconds.

        A cancelled request gives what it had, with finish_reason "abort".
        """
        if timeout is not None:
            fine = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
            if not fine or not timeout >= 0:
                raise InvalidArgumentError(f"[timeout] expected None or seconds, got {timeout!r}")
            timeout = min(timeout, threading.TIMEOUT_MAX)
        if not self.done:
            self._scheduler.refuse_inside_a_round()
        self._delivery.wait(timeout)
        return request_output(self._requests)

    def cancel(self) -> None:
        """End it now, or after the round under way. Of no effect on one that is done."""
        self._scheduler.withdraw(self._requests)

    def __iter__(self) -> RequestHandle:
        return self

    def __next__(self) -> Increment:
        if not self.done:
            self._scheduler.refuse_inside_a_round()
        while (request := self._delivery.take()) is not None:
            if (increment := self._increment_of(request)) is not None:
                return increment
        self._raise_error()
        raise StopIteration

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Increment:
        self._scheduler.refuse_in_a_fork()
        while (request := await self._delivery.take_async()) is not None:
            if (increment := self._increment_of(request)) is not None:
                return increment
        self._raise_error()
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        self._scheduler.refuse_in_a_fork()
        yield from self._delivery.wait_async().__await__()
        return request_output(self._requests)

    def _increment_of(self, request: Request) -> Increment | None:
        try:
            increment = request.increment()
        except BaseException:  # Ctrl-C, say
            self._delivery.put_back(request)
            raise
        if increment is None:  # its text cannot be made: it need not go on
            self._scheduler.withdraw([request])
        return increment

    def _raise_error(self) -> None:
        for request in self._requests:
            if request.failed_with is not None:
                raise request.failed_with

    def __del__(self) -> None:
        # The collector may be anywhere, locks and all: this only leaves word.
        if not self._delivery.over:
            self._scheduler.abandon(self._requests)
