"""From the thread that runs rounds to whoever waits for a request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .bells import bell_of

if TYPE_CHECKING:
    from .bells import Waker
    from .request import Request

__all__ = ["Delivery"]


class Delivery:
    """News of the samples of one call, in order, and when all are over.

    News are the samples themselves: whoever takes one has its next increment made. One thread at a
    time puts; any number of threads and event loops take, each of the news once.
    """

    def __init__(self, samples: int, *, increments: bool = True) -> None:
        lock = threading.RLock()  # who reads may be interrupted by a handler that cancels
        # Whoever waits for the end sleeps through the increments: waking costs more than the rest.
        self._changed = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        # `put` takes no lock where nobody is asleep. So who goes to sleep notes it here first, and
        # looks for news after that.
        self._readers = 0
        self._readers_asleep: deque[Waker] = deque()
        self._others_asleep: deque[Waker] = deque()
        """Tasks that wait for the end."""
        self._increments = increments
        self._news: deque[Request] = deque()
        self._open = samples

    @property
    def over(self) -> bool:
        """Whether every sample has ended; news may still wait to be taken."""
        return self._open == 0

    def put(self, sample: Request, woken: list[Waker]) -> None:
        """It has more to tell. Tasks that wait are added to `woken`, for `wake`."""
        if self._increments:
            self._news.append(sample)
            if self._readers_asleep:
                _move(self._readers_asleep, woken)
            if self._readers:
                with self._changed:
                    self._changed.notify_all()

    def end_one(self, woken: list[Waker]) -> None:
        """A sample is over, after what was put."""
        with self._changed:
            self._open -= 1
            if self.over:
                self._changed.notify_all()
                self._ended.notify_all()
        if self.over:
            _move(self._readers_asleep, woken)
            _move(self._others_asleep, woken)

    def poll(self) -> Request | None:
        """The next of the news if there is any."""
        try:
            return self._news.popleft()
        except IndexError:
            return None

    def put_back(self, sample: Request) -> None:
        """What was taken has not been told: it comes next."""
        self._news.appendleft(sample)

    def take(self) -> Request | None:
        """The next of the news, once there is any; None at the end."""
        while True:
            over = self.over
            sample = self.poll()
            if sample is not None or over:
                return sample
            self.wait_for_news()

    def wait_for_news(self) -> None:
        """Until there is something to take or all is over."""
        with self._changed:
            self._readers += 1
            try:
                self._changed.wait_for(lambda: self._news or self.over)
            finally:
                self._readers -= 1

    def wait(self, timeout: float | None = None) -> None:
        """Until all is over. Raises TimeoutError."""
        with self._ended:
            if not self._ended.wait_for(lambda: self.over, timeout):
                raise TimeoutError(f"not finished within {timeout} s")

    async def take_async(self) -> Request | None:
        while True:
            over = self.over
            sample = self.poll()
            if sample is not None or over:
                return sample
            await self._sleep(self._readers_asleep, lambda: bool(self._news) or self.over)

    async def wait_async(self) -> None:
        while not self.over:
            await self._sleep(self._others_asleep, lambda: self.over)

    async def _sleep(self, among: deque[Waker], ready: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        waker = (bell_of(loop), loop.create_future())
        among.append(waker)
        try:
            if not ready():
                await waker[1]
        finally:
            with contextlib.suppress(ValueError):  # it has been woken
                among.remove(waker)


def _move(asleep: deque[Waker], woken: list[Waker]) -> None:
    try:
        while asleep:
            woken.append(asleep.popleft())
    except IndexError:  # the last has left by itself
        return
