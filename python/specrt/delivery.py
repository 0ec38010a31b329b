"""From the thread that runs rounds to whoever waits for a request."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .outputs import Increment

    Waker = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]

__all__ = ["Delivery", "wake"]


class Delivery:
    """What the samples of one call bring forth: increments in order, and when all are over.

    One thread at a time puts; any number of threads and event loops take, each increment once.
    """

    def __init__(self, samples: int, *, increments: bool = True) -> None:
        lock = threading.Lock()
        # Whoever waits for the end sleeps through the increments: waking costs more than the rest.
        self._changed = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        self._readers = 0
        """Threads that wait for an increment."""
        self._increments = increments
        self._items: deque[Increment] = deque()
        self._open = samples
        self._readers_asleep: list[Waker] = []
        self._others_asleep: list[Waker] = []
        """Tasks that wait for the end."""

    @property
    def over(self) -> bool:
        """Whether every sample has ended; increments may still wait to be taken."""
        return self._open == 0

    def put(self, increment: Increment | None, *, done: bool, woken: list[Waker]) -> None:
        """News of one sample. Event loops that wait are added to `woken`, for `wake`."""
        if not self._increments and not done:
            return
        with self._changed:
            if increment is not None and self._increments:
                self._items.append(increment)
            if done:
                self._open -= 1
                if self.over:
                    woken += self._others_asleep
                    self._others_asleep.clear()
                    self._ended.notify_all()
            if self._readers_asleep:
                woken += self._readers_asleep
                self._readers_asleep.clear()
            if self._readers:
                self._changed.notify_all()

    def poll(self) -> Increment | None:
        """The next increment if there is one."""
        with self._changed:
            return self._items.popleft() if self._items else None

    def take(self, timeout: float | None = None) -> Increment | None:
        """The next increment, None at the end. Raises TimeoutError."""
        with self._changed:
            self._wait_for_news(timeout)
            return self._items.popleft() if self._items else None

    def wait_for_news(self) -> None:
        """Until there is something to take or all is over."""
        with self._changed:
            self._wait_for_news(None)

    def _wait_for_news(self, timeout: float | None) -> None:
        self._readers += 1
        try:
            if not self._changed.wait_for(lambda: self._items or self.over, timeout):
                raise TimeoutError(f"no output within {timeout} s")
        finally:
            self._readers -= 1

    def wait(self, timeout: float | None = None) -> None:
        """Until all is over. Raises TimeoutError."""
        with self._ended:
            if not self._ended.wait_for(lambda: self.over, timeout):
                raise TimeoutError(f"not finished within {timeout} s")

    async def take_async(self) -> Increment | None:
        while True:
            with self._changed:
                if self._items:
                    return self._items.popleft()
                if self.over:
                    return None
                waker = _waker(self._readers_asleep)
            await self._sleep(waker, self._readers_asleep)

    async def wait_async(self) -> None:
        while True:
            with self._changed:
                if self.over:
                    return
                waker = _waker(self._others_asleep)
            await self._sleep(waker, self._others_asleep)

    async def _sleep(self, waker: Waker, among: list[Waker]) -> None:
        try:
            await waker[1]
        finally:
            with self._changed:
                if waker in among:
                    among.remove(waker)


def _waker(among: list[Waker]) -> Waker:
    loop = asyncio.get_running_loop()
    waker = (loop, loop.create_future())
    among.append(waker)
    return waker


def wake(woken: Iterable[Waker]) -> None:
    """Wake tasks, with one call to each event loop however many they are."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in woken:
        by_loop.setdefault(loop, []).append(future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, futures)
        except RuntimeError:  # the loop was closed, and its tasks with it
            continue


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
